"""`ParameterServerStrategy`: variables on servers, steps on workers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal, _tf_internal, errors, option_checks
from tf_strategies.checkpoint import model_state
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import reachability
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.keras import scope_checks
from tf_strategies.strategies.parameter_server import (
  connection,
  extended,
  input,
  recovery,
  splits,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib
from tf_strategies.strategies.parameter_server import options as options_lib


class StepFunction:
  """What Keras calls in place of its own train, test or predict function."""

  def __init__(self, strategy, keras_step: _keras_internal.KerasStep):
    self._strategy = strategy
    self._model = keras_step.model
    self._predicts = keras_step.kind == 'predict'
    self._has_reported = False
    trains = keras_step.kind == 'train'
    option_checks.check(
      not self._model.jit_compile,
      'jit_compile=True',
      f'jit_compile=False of model {self._model.name!r} under '
      'ParameterServerStrategy',
      'compile the model with jit_compile=False, since XLA cannot reach '
      'variables on servers. Decorate a function that its train_step calls '
      'with tf.function(jit_compile=True)',
    )
    optimizer = getattr(self._model, 'optimizer', None) if trains else None
    if optimizer is not None and not optimizer.built:
      with strategy.scope():
        optimizer.build(self._model.trainable_variables)
    self._step = engine_lib.Step(
      run=functools.partial(strategy._in_replica, keras_step.run),
      trains=trains,
      optimizers=() if optimizer is None else (optimizer,),
      counters=lambda: self._model.metrics_variables,
      results=_keras_internal.results_of(self._model, keras_step.kind),
    )

  def __call__(self, iterator: Any) -> Any:
    """Begins the next steps.

    Returns what the newest step that is done reported; for prediction, the
    outputs of these batches.
    """
    if self._predicts:
      return tf.nest.map_structure(
        lambda *parts: tf.constant(np.concatenate(parts, 0)),
        *self._predict(iterator),
      )
    data = [
      _keras_internal.without_optionals(batch)
      for batch in itertools.islice(iterator, self._model.steps_per_execution)
    ]
    if not data:
      raise StopIteration
    # A group at the end of the data may be shorter. A `fit` cannot continue in the
    # middle of a group.
    is_whole = len(data) == self._model.steps_per_execution
    hides_rows = getattr(iterator, 'hides_rows', True)
    work = input.steps_on(data, hides_rows)
    if not self._has_reported:
      self._look(work[0])
    report = self._strategy.begin(self._step, work, is_whole)
    if report is None and not self._has_reported:
      raise errors.DataError(
        'Expected data from the function given to '
        'distribute_datasets_from_function, got none for any of '
        f'{len(work[0].splits)} workers. Fix: see what it returns for their '
        '`InputContext`s.'
      )
    if report is None:
      raise StopIteration  # Nobody had anything left to read.
    self._has_reported = True
    return report

  def _look(self, work: engine_lib.Work) -> None:
    """Writes the first checkpoint, and traces the step, which may make variables."""
    strategy = self._strategy
    if self._step.trains:
      strategy.track(**model_state.state_of(self._model))
    load = list(strategy.extended.placement.load)

    def look():
      # It may be traced with what an earlier call has lost, and then sent.
      strategy.liveness.wait_for_answers()
      strategy.engine.function(self._step, work.layout)

    strategy.recovery.with_recovery(look)
    if self._step.trains and strategy.extended.placement.load != load:
      strategy.save()  # Checkpoints have the new variables too.

  def _predict(self, data):
    works = input.steps_on(
      map(_keras_internal.without_optionals, data), hides_rows=True
    )
    if isinstance(works[0], splits.Source):
      return self._predict_read(works[0], len(works))

    def call_and_wait():
      updates = [self._strategy.engine.submit(self._step, [b]) for b in works]
      return [update.result() for update in updates]

    return self._strategy.recovery.with_recovery(call_and_wait)

  def _predict_read(self, source, steps):
    """Returns the next predictions of data that workers read, in one device's order."""
    found = []
    for _ in range(steps):
      if not source.predicted:
        updates = self._strategy.recovery.with_recovery(
          lambda: self._strategy.engine.run_round(self._step, source)
        )
        source.predicted = [update.outputs for update in updates]
      count = len(source.predicted) if source.dataset.by_rounds else 1
      found += source.predicted[:count]
      del source.predicted[:count]
    if not found:
      raise StopIteration
    return found


@option_checks.has_options
class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
  """Trains on workers that share variables on parameter servers.

  The task `chief` makes it. Tasks `ps` and
  `worker` run a `tf.distribute.Server`, as `tfs.cluster.run_task` does. `fit`,
  `evaluate` and `predict` of Keras 3 run their steps on the workers:

    def train():
      strategy = tfs.ParameterServerStrategy()
      with strategy.scope():
        model = build_model()
        model.compile('adam', 'sparse_categorical_crossentropy')
      model.fit(dataset, epochs=3)

    tfs.cluster.run_task(train)

  A custom loop uses `step`, or TensorFlow's `ClusterCoordinator`.

  Modes:

  * 'async': each worker applies its gradient as soon as it has it (Dean et al.
    2012, "Large Scale Distributed Deep Networks").
  * 'sync': every batch is one step; its rows are split among the workers,
    and their mean gradient is applied once. Equal to one device, with clipping,
    accumulation and loss scaling, for any number of workers. If a step is not a mean
    over rows, for example your own `train_step`, one worker computes it. If workers
    read the data, a step takes one batch of each worker and equals one device's step
    on all of them. With `backup_workers=k` the first N - k microbatches count, and late
    ones are dropped
    (Chen et al. 2016, "Revisiting Distributed Synchronous SGD").
  * 'bounded': as 'async', but no worker begins a step when it is more than
    `max_staleness` steps ahead of the slowest (Ho et al. 2013, "More Effective
    Distributed ML via a Stale Synchronous Parallel Parameter Server").

  Variables are placed by bytes: the first MiB on one server, so that a small model
  is on one. The optimizer's update runs where its variable is. Additions are atomic.

  No step is lost when a worker dies. With `backup_workers`, its rows of one step may
  be dropped. A worker that is back is used again. When a
  server dies and `checkpoint_dir` is given, training waits for it and continues from
  the newest whole checkpoint, with all variables. Without `checkpoint_dir` a
  `ParameterServerUnavailableError` is raised. Servers that see `checkpoint_dir` write
  their own tables there.

  The chief that connected last drives the servers. An older chief that is still alive
  ends with a `TakenOverError`.

  Each worker is one replica, on its first GPU or its CPU: start one worker a
  GPU. Most tests also passed on virtual GPUs; speed was measured on CPUs only.

  Args:
    cluster: the tasks; None reads TF_CONFIG.
    variable_partitioner: function that returns the number of parts into which a
      variable is cut along its first axis; see
      `tf.distribute.experimental.partitioners`. None cuts tables of 64 MB or more,
      with 16 times more rows than columns, into one part per server.
      `lambda shape, dtype: [1] * len(shape)` cuts none. Scalars are never cut.
    mode: see above.
    backup_workers: with 'sync', number of gradients that a step does not wait for.
    max_staleness: with 'bounded', number of steps.
    checkpoint_dir: directory of the job's checkpoints; None for none.
    checkpoint_steps: steps between two checkpoints.
    start_timeout: seconds in which all tasks must answer at the start.
    recovery_timeout: seconds in which a lost server must be back.
    step_timeout: seconds without a finished step.
    keepalive_timeout: seconds in which a task answers nothing, after which it
      counts as dead.

  Raises:
    ClusterConfigError: no cluster, no ps, no worker, or this is not the chief.
    UnsupportedOptionError: an option or combination that is not allowed.
    RendezvousError: tasks that did not answer within `start_timeout`, by name;
      or the chief's port is taken.
    InUseError: a live process of another run writes into `checkpoint_dir`.
  """

  def __init__(
    self,
    cluster: config_lib.ClusterConfig | None = None,
    variable_partitioner: Callable | None = None,
    mode: str = 'async',
    *,
    backup_workers: int = 0,
    max_staleness: int = 1,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_steps: int = 1000,
    start_timeout: float = 300.0,
    recovery_timeout: float = 300.0,
    step_timeout: float = 600.0,
    keepalive_timeout: float = 60.0,
  ):
    self.options = options_lib.ParameterServerOptions(
      mode,
      variable_partitioner,
      backup_workers=backup_workers,
      max_staleness=max_staleness,
      checkpoint_dir=checkpoint_dir,
      checkpoint_steps=checkpoint_steps,
      start_timeout=start_timeout,
      recovery_timeout=recovery_timeout,
      step_timeout=step_timeout,
      keepalive_timeout=keepalive_timeout,
    )
    self.cluster = connection.checked_cluster(cluster)
    workers_lib.note_joined()
    workers = tuple(range(len(self.cluster.jobs['worker'])))
    self.options.check_workers(len(workers))
    # What TensorFlow's __init__ does, with an implementation of our own.
    self._cluster_coordinator = None
    self._cluster_resolver = connection.resolver(self.cluster)
    self._num_workers = len(workers)
    self._num_ps = len(self.cluster.jobs['ps'])
    self._connect()
    # Each of these uses those before it, and none of those after it.
    self.liveness = connection.Liveness(
      self.cluster, self.options.keepalive_timeout
    )
    self._pool = worker_pool.WorkerPool(
      workers,
      self.liveness,
      timeout_seconds=self.options.step_timeout,
    )
    try:
      self.liveness.hold_lease(connection.Lease(), self._pool.end)
    except errors.Error:
      self.liveness.close()
      raise
    registry = weakref.WeakValueDictionary()
    self.recovery = recovery.Recovery(
      self.options,
      self.liveness,
      self._pool,
      registry,
    )
    # All functions of this process: those of Keras and of the user too.
    _tf_internal.before_sending_functions(self._wait_for_answers)
    self.engine = engine_lib.Engine(
      self._pool, self.recovery, self._in_replica, self.options
    )
    implementation = extended.ParameterServerExtended(
      self,
      registry,
      make_step_function=functools.partial(StepFunction, self),
    )
    tf.distribute.Strategy.__init__(self, implementation)
    scope_checks.note_created(self)
    self._should_use_with_coordinator = True
    self._canonicalize_devices = False
    self._is_parameter_server_strategy_v2 = True

  def _connect(self) -> None:
    """Connects this process to all tasks, unless it is connected to them."""
    if connection.is_connected(self.cluster):
      return
    connection.wait_for_tasks(
      connection.addresses(self.cluster), self.options.start_timeout, 'to train'
    )
    with (
      _tf_internal.without_notices(),
      reachability.serving('chief 0', self.cluster.address),
    ):
      self._connect_to_cluster(coordinator_name='chief')

  def scope(self) -> contextlib.AbstractContextManager:
    """See base class."""
    scope_checks.note_entered(self)
    return super().scope()

  def _in_replica(self, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the scope and in the context of a replica."""
    return self.extended.call_for_each_replica(function, args)

  def _wait_for_answers(self) -> None:
    if not _keras_internal.is_for_model():
      self.liveness.wait_for_answers()
      return
    # Keras makes the data of an epoch or an evaluation: no step is traced, and
    # nobody further out could do it again, since a generator gives its batches
    # once.
    with tf.init_scope():
      self.recovery.with_recovery(self.liveness.wait_for_answers)

  def step(
    self,
    fn: Callable[[Any], Any],
    optimizers: Sequence[Any] = (),
  ) -> Callable[[Any], Any]:
    """Makes a step of a custom loop run on the workers, in this mode.

    Example:

      train = strategy.step(train_fn, [optimizer])
      for batch in dataset:
        results = train(batch)
      strategy.join()

    Args:
      fn: function of a batch in replica context, as with `strategy.run`. It applies
        gradients with `optimizer.apply`, and returns a structure of numbers.
      optimizers: the optimizers that it applies; none for a step that evaluates. In
        'sync' the workers share the rows of a batch if the results can be combined
        exactly. Otherwise one worker computes the whole batch, with a warning.

    Returns:
      A function of a batch: a structure of arrays or tensors, or what an iterator over
      `distribute_datasets_from_function` yields. It begins a step, and waits only while
      too many are running. In 'sync' it returns what this step returned; None if no
      worker had anything left to read. In other modes it returns what the newest step
      that is done returned, read when it is used as a float: of this step after
      `strategy.join()`.
    """
    option_checks.check_step(fn, optimizers)
    step = engine_lib.Step(
      run=functools.partial(self._in_replica, _tf_internal.inlined(fn)),
      trains=bool(optimizers),
      optimizers=tuple(optimizers),
    )

    def begin(batch: Any) -> Any:
      return self.begin(step, input.steps_on([batch]))

    return begin

  def join(self) -> None:
    """Waits until all steps that were begun are done.

    With `backup_workers`, it does not wait for workers whose gradient was dropped.

    Raises:
      ParameterServerUnavailableError: a server died.
      WorkerUnavailableError: nothing happened for `step_timeout`.
    """
    self._drained(lambda: None)

  def report(self) -> dict[str, Any]:
    """Returns counters: steps, staleness, dropped gradients, load.

    Returns:
      mode; steps (done); staleness (number of steps by how many other steps
      were applied while they were computed); dropped (gradients that steps
      were done without, in mode 'sync'); bytes_per_server; recoveries (server,
      lost_steps of the restored state, and seconds; one for all servers that were
      lost together).
    """
    return {
      'mode': self.options.mode,
      **self.engine.report(),
      'bytes_per_server': list(self.extended.placement.load),
      'recoveries': list(self.recovery.history),
    }

  def begin(
    self, step, works: Sequence[engine_lib.Work], may_save: bool = True
  ) -> Any:
    """Begins steps.

    Args:
      step: what workers run.
      works: what each step trains on.
      may_save: whether a run can continue after these steps.

    Returns:
      What the newest step that is done reports; None if there was nothing to read.
    """
    report, is_due = None, False
    for work in works:
      found = self.recovery.with_recovery(
        lambda each=work: self.engine.begin(step, each)
      )
      if found is None:
        break
      report = found
      if step.trains:
        is_due = self.recovery.note_begun(work)
    if is_due and may_save:
      self.save()
    return report

  def track(self, **objects: Any) -> None:
    """Says what checkpoints hold, for a custom loop; `fit` says it by itself.

    Args:
      **objects: models, optimizers, metrics and variables, by name.
    """
    if self.recovery.track(objects):
      self.save()

  def restore(self, **objects: Any) -> int:
    """Restores the newest whole checkpoint of `checkpoint_dir`.

    Args:
      **objects: as for `track`; all their variables must exist.

    Returns:
      Number of steps that had been begun when it was written; 0 without one.
    """
    if self.recovery.restore(objects) is None:
      self.track(**objects)
    return self.recovery.begun_before

  def save(self, recovers: bool = True) -> str | None:
    """Waits for all steps and writes a checkpoint; returns its path.

    None without `checkpoint_dir`, or before anything is tracked.

    Args:
      recovers: whether to wait for a server that died, instead of raising.
    """

    if recovers:
      return self._drained(self.recovery.write)
    self._pool.wait()
    return self.recovery.write()

  def mark_finished(self, is_finished: bool = True) -> None:
    """Tells a `SidecarEvaluator` whether more checkpoints will follow.

    `tfs.Run` calls it. Does nothing without
    `checkpoint_dir`.
    """
    self.recovery.mark_finished(is_finished)

  def distribute_datasets_from_function(self, dataset_fn, options=None):
    """Makes a data set that the workers read themselves.

    Each element counts once an epoch, also when a worker dies (with `backup_workers`
    at most once). In 'sync' a step takes
    one of each worker that has one, else one.

    Args:
      dataset_fn: makes the data set of a split from a
        `tf.distribute.InputContext`: its part is number `input_pipeline_id` of
        `num_input_pipelines`. It must yield the same elements each time.
      options: `tf.distribute.InputOptions`.
    """
    if not tf.executing_eagerly():
      return super().distribute_datasets_from_function(dataset_fn, options)
    return input.WorkerDataset(
      dataset_fn,
      self._num_workers,
      self.recovery.take_resumed,
      by_rounds=self.options.mode == 'sync',
    )

  def _drained(self, action):
    """Does something when all steps are done."""

    def drain_and_act():
      self._pool.wait()
      return action()

    return self.recovery.with_recovery(drain_and_act)

  def experimental_distribute_dataset(self, dataset, options=None):
    """Makes a data set whose batches this process hands to the workers."""
    if not tf.executing_eagerly():
      return super().experimental_distribute_dataset(dataset, options)
    if isinstance(dataset, input.FedDataset | input.WorkerDataset):
      return dataset
    return input.FedDataset(dataset, self.recovery.take_resumed)

  def close(self) -> None:
    """Ends the threads of this strategy; the servers stay."""
    self._pool.close()
    self.liveness.close()
    self.recovery.close()
