"""The compared loops: Keras's `fit` under our strategy, and a custom loop."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

import tf_strategies as tfs
from benchmarks.parameter_server_peers import catalogue, models


class Loop(abc.ABC):
  """Trains models with one strategy.

  Args:
    peer: the peer.
    cluster: addresses of the tasks by job.

  Attributes:
    strategy: the strategy, connected to the cluster.
    model: the current model.
    optimizer: optimizer of that model.
  """

  def __init__(
    self, peer: catalogue.Peer, cluster: Mapping[str, Sequence[str]]
  ):
    self.peer = peer
    self.strategy = self._connect(cluster)
    self.model: keras.Model | None = None
    self.optimizer: keras.optimizers.Optimizer | None = None

  @property
  def variables(self) -> list[keras.Variable]:
    """Returns all variables that training changes, except metrics."""
    return [*self.model.weights, *self.optimizer.variables]

  @abc.abstractmethod
  def build(self, name: str, steps_per_execution: int, batch_rows: int) -> None:
    """Builds a model and its data set.

    Args:
      name: name of the model.
      steps_per_execution: number of steps per call on a worker.
      batch_rows: number of rows per step.
    """

  @abc.abstractmethod
  def train(self, blocks: int, steps: int) -> list[float]:
    """Trains. No step is in progress when the clock is read.

    Args:
      blocks: number of blocks.
      steps: number of steps per block.

    Returns:
      The seconds of each block.
    """

  @abc.abstractmethod
  def _connect(
    self, cluster: Mapping[str, Sequence[str]]
  ) -> tf.distribute.Strategy:
    """Returns the strategy."""

  def release(self) -> None:
    """Deletes the model."""
    self.model = self.optimizer = None


class FitLoop(Loop):
  """Keras's `fit` under `tfs.ParameterServerStrategy`."""

  def build(self, name, steps_per_execution, batch_rows):
    """Builds and compiles a model."""
    with self.strategy.scope():
      self.model = models.build(name)
      self.model.compile(
        models.optimizer(name),
        models.loss(),
        steps_per_execution=steps_per_execution,
        jit_compile=False,
      )
      self.optimizer = self.model.optimizer
      self.optimizer.build(self.model.trainable_variables)
    self._data = models.dataset(batch_rows)
    if not self.peer.is_fed:
      self._data = self.strategy.distribute_datasets_from_function(
        lambda context: models.dataset(batch_rows)
      )

  def train(self, blocks, steps):
    """Trains one epoch per block."""
    # Our steps also run asynchronously to the coordinator.
    clock = _EpochClock(self.strategy.join)
    self.model.fit(
      self._data,
      epochs=blocks,
      steps_per_epoch=steps,
      verbose=0,
      callbacks=[clock],
    )
    return clock.seconds

  def release(self):
    """Deletes the model and its data."""
    super().release()
    self._data = None

  def _connect(self, cluster):
    return tfs.ParameterServerStrategy(
      tfs.cluster.ClusterConfig(cluster, 'chief', 0),
    )


class _EpochClock(keras.callbacks.Callback):
  """Measures the seconds of each epoch.

  It has no method for batches, because Keras would read the loss after each batch to
  call it.
  """

  def __init__(self, join: Callable[[], None]):
    super().__init__()
    self.seconds: list[float] = []
    self._join = join

  def on_epoch_begin(self, epoch, logs=None):
    self._join()
    self._start = time.perf_counter()

  def on_epoch_end(self, epoch, logs=None):
    self._join()
    self.seconds.append(time.perf_counter() - self._start)


class StockLoop(Loop):
  """TensorFlow's strategy as in its tutorial, with a closure per step."""

  def build(self, name, steps_per_execution, batch_rows):
    """Traces a step, and creates a data set on each worker."""
    with self.strategy.scope():
      model = self.model = models.build(name)
      optimizer = self.optimizer = models.optimizer(name)
      optimizer.build(model.trainable_variables)
    loss = models.loss()

    def replica_step(batch):
      images, classes = batch
      with tf.GradientTape() as tape:
        value = loss(classes, model(images, training=True))
      gradients = tape.gradient(value, model.trainable_variables)
      optimizer.apply_gradients(
        zip(gradients, model.trainable_variables, strict=True)
      )

    @tf.function
    def steps(iterator):
      for _ in tf.range(steps_per_execution):
        self.strategy.run(replica_step, args=(next(iterator),))

    @tf.function
    def step(iterator):
      self.strategy.run(replica_step, args=(next(iterator),))

    self._steps_per_execution = steps_per_execution
    self._step = step if steps_per_execution == 1 else steps
    self._data = iter(
      self._coordinator.create_per_worker_dataset(
        lambda: models.dataset(batch_rows)
      )
    )

  def train(self, blocks, steps):
    """Trains. A block is the steps that are scheduled between two joins."""
    seconds = []
    for _ in range(blocks):
      start = time.perf_counter()
      for _ in range(steps // self._steps_per_execution):
        self._coordinator.schedule(self._step, args=(self._data,))
      self._coordinator.join()
      seconds.append(time.perf_counter() - start)
    return seconds

  def release(self):
    """Deletes the model and its data."""
    super().release()
    self._step = self._data = None

  def _connect(self, cluster):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
      tf.train.ClusterSpec(cluster),
      task_type='chief',
      task_id=0,
      rpc_layer='grpc',
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    return strategy
