"""`ParameterServerStrategy`: variables on servers, steps on workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _keras_internal
from tf_strategies.cluster import config as config_lib
from tf_strategies.strategies.parameter_server import (
  connection,
  custom_loop,
  extended,
  input,
  liveness,
  local_sgd,
  recovery,
  sync_engine,
  training,
  variables,
  worker_function,
  worker_input,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib
from tf_strategies.strategies.parameter_server import options as options_lib


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
  """Trains on workers that share variables on parameter servers.

  The process that makes it is the coordinator (task `chief`). Tasks `ps` and
  `worker` run a `tf.distribute.Server`, as `tfs.cluster.run_task` does. `fit`,
  `evaluate` and `predict` of Keras 3 then run their steps on the workers:

    def train():
      strategy = tfs.ParameterServerStrategy()
      with strategy.scope():
        model = build_model()
        model.compile('adam', 'sparse_categorical_crossentropy')
      model.fit(dataset, epochs=3)

    tfs.cluster.run_task(train)

  A loop of one's own uses `remote_step`, or TensorFlow's `ClusterCoordinator`.

  Modes:

  * 'async': each worker applies its gradient as soon as it has it (Dean et al.
    2012, "Large Scale Distributed Deep Networks").
  * 'sync': every batch is one step; its rows are shared out among the workers,
    and their mean gradient is applied once. Equal to one device, with clipping,
    accumulation and loss scaling, whatever the number of workers. With
    `backup_workers=k` the first N - k shares count and late ones are dropped
    (Chen et al. 2016, "Revisiting Distributed Synchronous SGD").
  * 'bounded': as 'async', but no worker begins a step when it is more than
    `max_staleness` steps ahead of the slowest (Ho et al. 2013, "More Effective
    Distributed ML via a Stale Synchronous Parallel Parameter Server").

  Variables are placed by bytes. What a step reads, and what it adds to metrics
  and counters, crosses in one message a server. The optimizer's update runs
  where its variable is; additions are atomic.

  A worker that dies loses no step, and is used again when it is back. When a
  server dies and `checkpoint_dir` is given, training waits for it, restores the
  latest checkpoint and goes on; without it `ParameterServerUnavailableError` is
  raised.

  Each worker is one replica, on its first GPU or its CPU: start one worker a
  GPU. It was run on CPUs; no GPU has been tried.

  Args:
    cluster: the tasks; None reads TF_CONFIG.
    variable_partitioner: into how many parts a variable is cut along its first
      axis, as `tf.distribute.experimental.partitioners`; None cuts none.
      Scalars are never cut.
    mode: 'async', 'sync' or 'bounded'.
    **options: `backup_workers` (0) with 'sync'; `max_staleness` (1) with
      'bounded'; `local_steps` (1) with 'async': a worker reads the variables
      once, trains that many steps on its copy, and adds the difference divided
      by the number of workers, which is another algorithm; `checkpoint_dir` and
      `checkpoint_steps` (1000); `start_timeout`, `recovery_timeout` (300
      seconds), `step_timeout` (600 seconds without a finished step) and
      `keepalive_timeout` (60 seconds in which a task answers nothing, after which
      it counts as dead).

  Raises:
    ClusterConfigError: no cluster, no ps, no worker, or this is not the chief.
    UnsupportedOptionError: an option or combination that is not allowed.
    RendezvousError: tasks that did not answer within `start_timeout`, by name.
  """

  def __init__(
    self,
    cluster: config_lib.ClusterConfig | None = None,
    variable_partitioner: Callable | None = None,
    mode: str = 'async',
    **options,
  ):
    self.options = options_lib.make(mode, options)
    self.cluster = connection.checked_cluster(cluster)
    workers = tuple(self.cluster.jobs['worker'])
    self.options.check_workers(len(workers))
    connection.check_partitioner(variable_partitioner)
    # What TensorFlow's __init__ does, with an implementation of our own.
    self._cluster_coordinator = None
    self._cluster_resolver = connection.resolver(self.cluster)
    connection.connect(self, self.options.start_timeout)
    self.engine = None
    self.recovery = None
    implementation = extended.ParameterServerExtended(
      self,
      self._cluster_resolver,
      variable_partitioner,
      self._drained,
      self._forget_reports,
    )
    tf.distribute.Strategy.__init__(self, implementation)
    self._should_use_with_coordinator = True
    self._canonicalize_devices = False
    self._is_parameter_server_strategy_v2 = True
    self.liveness = liveness.Liveness(
      self.cluster, self.options.keepalive_timeout
    )
    self._markers = worker_function.CompletionMarkers(self._make_markers())
    self.recovery = recovery.Recovery(self)
    self.engine = self._make_engine(workers)
    self.engine.guard = self.recovery.with_recovery

  @property
  def shares_batches(self) -> bool:
    """Whether each batch is shared out among several workers."""
    several = len(self.cluster.jobs['worker']) > 1
    return self.options.mode == 'sync' and several

  def _make_markers(self):
    return variables.ServerVariable(
      server=0,
      drained=lambda action: action(),
      on_write=lambda: None,
      initial_value=lambda: tf.zeros(
        [2, worker_function.NUM_MARKERS], tf.int64
      ),
      trainable=False,
      name='marks',
    )

  def _make_engine(self, workers):
    arguments = (workers, self.liveness, self._markers)
    timeout = {'step_timeout': self.options.step_timeout}
    if self.options.mode == 'bounded':
      return engine_lib.BoundedEngine(
        *arguments, max_staleness=self.options.max_staleness, **timeout
      )
    if self.options.mode == 'sync':
      return sync_engine.SyncEngine(
        *arguments,
        backup_workers=self.options.backup_workers,
        in_replica=lambda fn: training.in_replica(self, fn),
        **timeout,
      )
    if self.options.local_steps > 1:
      return local_sgd.LocalEngine(
        *arguments, local_steps=self.options.local_steps, **timeout
      )
    return engine_lib.AsyncEngine(*arguments, **timeout)

  def run(self, fn, args=(), kwargs=None, options=None):
    """As `tf.distribute.Strategy.run`; Keras's steps go to the workers."""
    keras_step = _keras_internal.step_of(fn)
    if keras_step is None or kwargs or len(args) != 1:
      return super().run(fn, args, kwargs, options)
    function = training.StepFunction(self, keras_step)
    keras_step.install(function)
    return function.in_graph(args[0])

  def remote_step(
    self,
    fn: Callable[[Any], Any],
    optimizers: Sequence[Any] = (),
  ) -> custom_loop.RemoteStep:
    """Makes a step of a custom loop run on the workers, in this mode.

    Args:
      fn: takes a batch in replica context, as with `strategy.run`; applies
        gradients by `optimizer.apply`, and returns a structure of numbers.
      optimizers: those that it applies; none for a step that evaluates.
    """
    return custom_loop.RemoteStep(self, fn, optimizers)

  def join(self) -> None:
    """Waits until all steps that were begun are done.

    Raises:
      ParameterServerUnavailableError: a server died.
      WorkerUnavailableError: nothing happened for `step_timeout`.
    """
    self.recovery.with_recovery(self.drain)

  def report(self) -> dict[str, Any]:
    """What happened so far: steps, staleness, dropped gradients, load.

    Returns:
      mode; steps (done); staleness (number of steps by how many other steps
      were applied while they were computed); dropped (gradients that came too
      late, in mode 'sync'); bytes_per_server; recoveries (server, lost_steps
      and seconds of each).
    """
    return {
      'mode': self.options.mode,
      **self.engine.report(),
      'bytes_per_server': list(self.extended.placement.load),
      'recoveries': list(self.recovery.history),
    }

  def train_batches(self, step, batches, model=None):
    """Begins the steps of some batches."""
    if model is not None:
      self.recovery.track({'model': model, 'optimizer': model.optimizer})
    report = self.recovery.with_recovery(
      lambda: self.engine.train(step, batches)
    )
    self.recovery.note_begun(len(batches))
    return report

  def train_worker_input(self, step, source, steps, model=None):
    """Begins steps on data that workers read."""
    if model is not None:
      self.recovery.track({'model': model, 'optimizer': model.optimizer})
    report = self.recovery.with_recovery(
      lambda: self.engine.draw(step, source, steps)
    )
    self.recovery.note_begun(steps, source)
    return report

  def track(self, **trackables: Any) -> None:
    """Says what checkpoints hold, for a custom loop; `fit` says it by itself.

    Args:
      **trackables: by name, as for `tf.train.Checkpoint`.
    """
    self.recovery.track(trackables)

  def restore(self, **trackables: Any) -> int:
    """Restores the latest checkpoint of `checkpoint_dir`, and tracks it.

    Args:
      **trackables: as for `track`; all their variables must exist.

    Returns:
      Number of steps that had been begun when it was written; 0 without one.
    """
    position = self.recovery.restore(trackables)
    if position is None:
      self.recovery.track(trackables)
      return 0
    return position.get('steps', 0)

  def save(self) -> str | None:
    """Waits for all steps and writes a checkpoint; returns its path.

    None without `checkpoint_dir`, or before anything is tracked.
    """
    return self.recovery.with_recovery(self.recovery.save)

  def make_lost_variables(self) -> None:
    """Makes variables anew whose server was started again."""
    for variable in [*self.extended.server_variables(), self._markers.variable]:
      if not variable.is_alive():
        variable.recreate()

  def lost_variables(self) -> list[variables.ServerVariable]:
    """Those that were made anew and not restored since."""
    return [v for v in self.extended.server_variables() if v.is_lost]

  def distribute_datasets_from_function(self, dataset_fn, options=None):
    """Makes a data set that the workers read themselves.

    Each element counts once an epoch, also when a worker dies.

    Args:
      dataset_fn: makes the data set of a split from a
        `tf.distribute.InputContext`: its part is number `input_pipeline_id` of
        `num_input_pipelines`. It must yield the same elements each time.
      options: `tf.distribute.InputOptions`.
    """
    if not tf.executing_eagerly():
      return super().distribute_datasets_from_function(dataset_fn, options)
    return worker_input.WorkerDataset(
      dataset_fn,
      len(self.cluster.jobs['worker']),
      self.recovery.take_resumption,
    )

  def drain(self) -> None:
    """Waits until all steps that were begun are done."""
    if self.engine is not None:
      self.engine.drain()

  def _drained(self, action):
    """Does something with a variable when all steps are done."""
    if self.engine is None:
      return action()

    def drain_and_act():
      self.drain()
      return action()

    return self.recovery.with_recovery(drain_and_act)

  def _forget_reports(self) -> None:
    if self.engine is not None:
      self.engine.forget_reports()

  def experimental_distribute_dataset(self, dataset, options=None):
    """Makes a data set whose batches this process hands to the workers."""
    if not tf.executing_eagerly():
      return super().experimental_distribute_dataset(dataset, options)
    return input.feed(
      dataset,
      lambda d: super(
        ParameterServerStrategy, self
      ).experimental_distribute_dataset(d, options),
      self.recovery.take_resumption,
    )

  def close(self) -> None:
    """Ends the threads of this strategy; the servers go on."""
    self.engine.pool.close()
    self.liveness.close()
