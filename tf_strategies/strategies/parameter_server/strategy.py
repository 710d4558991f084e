"""`ParameterServerStrategy`: variables on servers, steps on workers."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tf_strategies.cluster import config as config_lib
from tf_strategies.coordinator import engine as engine_lib
from tf_strategies.coordinator import (
  drawn,
  liveness,
  local_engine,
  sync_engine,
  variables,
  worker_function,
)
from tf_strategies.keras import steps as keras_steps
from tf_strategies.strategies.parameter_server import (
  connection,
  custom_loop,
  extended,
  input,
  recovery,
  training,
)
from tf_strategies.strategies.parameter_server import options as options_lib


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
  """Trains on workers that share variables on parameter servers."""

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
      self._settled,
      self._forget_reports,
    )
    tf.distribute.Strategy.__init__(self, implementation)
    self._should_use_with_coordinator = True
    self._canonicalize_devices = False
    self._is_parameter_server_strategy_v2 = True
    self.liveness = liveness.Liveness(self.cluster)
    self._marks = worker_function.Marks(self._make_marks())
    self.recovery = recovery.Recovery(self)
    self.engine = self._make_engine(workers)

  @property
  def shares_batches(self) -> bool:
    """Whether each batch is shared out among several workers."""
    several = len(self.cluster.jobs['worker']) > 1
    return self.options.mode == 'sync' and several

  def _make_marks(self):
    return variables.ServerVariable(
      server=0,
      settled=lambda action: action(),
      on_write=lambda: None,
      initial_value=lambda: tf.zeros([2, worker_function.NUM_MARKS], tf.int64),
      trainable=False,
      name='marks',
    )

  def _make_engine(self, workers):
    arguments = (workers, self.liveness, self._marks)
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
      return local_engine.LocalEngine(
        *arguments, local_steps=self.options.local_steps, **timeout
      )
    return engine_lib.AsyncEngine(*arguments, **timeout)

  def run(self, fn, args=(), kwargs=None, options=None):
    keras_step = keras_steps.step_of(fn)
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
    self.recovery.guard(self.settle)

  def report(self) -> dict[str, Any]:
    """What happened so far: steps, staleness, dropped gradients, load.

    Returns:
      mode; steps (done); staleness (number of steps by how many other steps
      were applied while they were computed); dropped (gradients that came too
      late, in mode 'sync'); bytes_per_server.
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
    report = self.recovery.guard(lambda: self.engine.train(step, batches))
    self.recovery.note_begun(len(batches))
    return report

  def train_drawn(self, step, source, steps, model=None):
    """Begins steps on data that workers read."""
    if model is not None:
      self.recovery.track({'model': model, 'optimizer': model.optimizer})
    report = self.recovery.guard(lambda: self.engine.draw(step, source, steps))
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

  def make_lost_variables(self) -> None:
    """Makes variables anew whose server was started again."""
    for variable in [*self.extended.server_variables(), self._marks.variable]:
      if not variable.is_alive():
        variable.recreate()

  def lost_variables(self) -> list[variables.ServerVariable]:
    """Those that were made anew and not restored since."""
    return [v for v in self.extended.server_variables() if v.is_lost]

  def distribute_datasets_from_function(self, dataset_fn, options=None):
    if not tf.executing_eagerly():
      return super().distribute_datasets_from_function(dataset_fn, options)
    return drawn.DrawnDataset(
      dataset_fn,
      len(self.cluster.jobs['worker']),
      self.recovery.take_resumption,
    )

  def settle(self) -> None:
    """Waits until all steps that were begun are done."""
    if self.engine is not None:
      self.engine.settle()

  def _settled(self, action):
    """Does something with a variable when all steps are done."""
    if self.engine is None:
      return action()

    def settle_and_act():
      self.settle()
      return action()

    return self.recovery.guard(settle_and_act)

  def _forget_reports(self) -> None:
    if self.engine is not None:
      self.engine.forget_reports()

  def experimental_distribute_dataset(self, dataset, options=None):
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
    self.engine.pool.close()
