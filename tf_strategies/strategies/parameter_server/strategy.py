"""`ParameterServerStrategy`: variables on servers, steps on workers."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tf_strategies.cluster import config as config_lib
from tf_strategies.coordinator import engine as engine_lib
from tf_strategies.coordinator import (
  liveness,
  variables,
  worker_function,
)
from tf_strategies.keras import steps as keras_steps
from tf_strategies.strategies.parameter_server import (
  connection,
  extended,
  input,
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
    connection.connect(self)
    self.engine = None
    implementation = extended.ParameterServerExtended(
      self,
      self._cluster_resolver,
      variable_partitioner,
      self.settle,
      self._forget_reports,
    )
    tf.distribute.Strategy.__init__(self, implementation)
    self._should_use_with_coordinator = True
    self._canonicalize_devices = False
    self._is_parameter_server_strategy_v2 = True
    self.liveness = liveness.Liveness(self.cluster)
    self._marks = worker_function.Marks(self._make_marks())
    self.engine = self._make_engine(workers)

  def _make_marks(self):
    return variables.ServerVariable(
      server=0,
      settle=lambda: None,
      on_write=lambda: None,
      initial_value=lambda: tf.zeros([worker_function.NUM_MARKS], tf.int64),
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
    return engine_lib.AsyncEngine(*arguments, **timeout)

  def run(self, fn, args=(), kwargs=None, options=None):
    keras_step = keras_steps.step_of(fn)
    if keras_step is None or kwargs or len(args) != 1:
      return super().run(fn, args, kwargs, options)
    function = training.StepFunction(self, keras_step)
    keras_step.install(function)
    return function.in_graph(args[0])

  def in_replica(self, fn):
    return training.in_replica(self, fn)

  def train_batches(self, step, batches, model=None):
    return self.engine.train(step, batches)

  def settle(self) -> None:
    if self.engine is not None:
      self.engine.settle()

  def _forget_reports(self) -> None:
    if self.engine is not None:
      self.engine.forget_reports()

  def experimental_distribute_dataset(self, dataset, options=None):
    if tf.inside_function():
      return super().experimental_distribute_dataset(dataset, options)
    return input.feed(
      dataset,
      lambda d: super(
        ParameterServerStrategy, self
      ).experimental_distribute_dataset(d, options),
    )

  def close(self) -> None:
    self.engine.pool.close()
