"""Trains on MNIST with a loop of one's own and a strategy of tf_strategies.

Four logical CPUs and the digits that scikit-learn carries, offline:

  python -m examples.mnist_custom_loop --strategy=ring_mirrored \\
    --num_virtual_devices=4 --dataset=digits

Two workers with two logical CPUs each, and the report of the first:

  python -m tf_strategies.launch --num_workers=2 -- \\
    python -m examples.mnist_custom_loop --strategy=multi_worker_ring \\
    --num_virtual_devices=2 --dataset=digits

It does what `mnist_keras_fit` does, with the same flags, and shows every part:
the distributed iterator, the step that all replicas run, the weighting of the
loss, metrics over all replicas, and checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import tf_strategies as tfs
from examples import (
  checkpointing,
  command_line,
  common_flags,
  mnist_common,
  mnist_model,
  training_report,
)
from tf_strategies.checkpoint.position import Position


def train(
  options: common_flags.TrainingOptions, devices: Sequence[str] | None = None
) -> dict[str, object]:
  """Trains as `options` say.

  Args:
    options: what and how.
    devices: names of the devices to use; None for all.

  Returns:
    The report of the run.

  Raises:
    UnsupportedOptionError: options that cannot give a right result.
    DataError: data that are missing or damaged.
    CheckpointMismatchError: `checkpoint_dir` holds another run's.
  """
  setup = mnist_common.set_up(options, devices)
  with setup.strategy.scope():
    model = mnist_model.build_model(
      options.model, setup.data.source.num_classes, options.dropout
    )
    optimizer = mnist_model.build_optimizer(options, setup.num_replicas)
    # Variables may not be made while the step is traced.
    optimizer.build(model.trainable_variables)
    metrics = Metrics()
  checkpoint, start = checkpointing.open_run(
    setup, model, optimizer, metrics.all
  )
  loop = _Loop(setup, model, optimizer, metrics)
  batches = setup.data.train(
    setup.strategy, start.epoch, options.epochs, start.step
  )
  outcome = run_epochs(setup, loop, checkpoint, start, batches)

  if options.save_weights:
    variables = checkpointing.state_variables(model, optimizer)
    training_report.write_weights(
      variables, options.save_weights, setup.strategy
    )
  return training_report.build('mnist_custom_loop', setup, model, outcome)


def run_epochs(
  setup: mnist_common.Setup,
  loop,
  checkpoint: tfs.RunCheckpoint | None,
  start: Position,
  batches,
) -> training_report.Outcome:
  """Trains epoch by epoch; shows, logs and saves each.

  Args:
    setup: of the run.
    loop: has `train_epoch(epoch, first_step, iterator, after_step)` and
      `evaluate()`, which return loss and accuracy, a `throughput`, and the
      `variables` of all that it trains. It calls `after_step(epoch, step)` with
      the number of steps that are done.
    checkpoint: where each epoch is saved, if it is.
    start: the epochs and steps that are done.
    batches: of all epochs from there on, distributed over the strategy.
  """
  with contextlib.ExitStack() as stack:
    after_step = _do_nothing
    if setup.monitor is not None:
      first_step = start.epoch * setup.data.steps_per_epoch + start.step
      setup.monitor.start(setup.strategy, first_step)
      stack.callback(setup.monitor.close)
    saver = checkpointing.saver(setup, checkpoint)
    if saver is not None:
      preemption = stack.enter_context(tfs.Preemption(saver))

      def after_step(epoch, step):
        # Evaluation takes long: there workers ask each other before it.
        at_once = step == setup.data.steps_per_epoch
        if preemption.is_requested(at_once):
          preemption.save_and_exit(epoch, step)

    return _run_epochs(setup, loop, checkpoint, start, batches, after_step)


def _do_nothing(epoch, step):
  """After a step of a run that is not saved."""


def _run_epochs(setup, loop, checkpoint, start, batches, after_step):
  options = setup.options
  logger = training_report.ScalarLogger(
    options.log_dir if setup.is_chief else None
  )
  iterator = iter(batches)
  train_results = test_results = None
  for epoch in range(start.epoch, options.epochs):
    first_step = start.step if epoch == start.epoch else 0
    train_results = loop.train_epoch(epoch, first_step, iterator, after_step)
    test_results = loop.evaluate()
    if options.verbose and setup.is_chief:
      _print_epoch(epoch, options.epochs, train_results, test_results)
    logger.write(epoch, train=train_results, test=test_results)
    if checkpoint is not None:
      checkpoint.save(epoch + 1)
  if test_results is None:  # Every epoch had been done before.
    test_results = loop.evaluate()
  return training_report.Outcome(
    start.epoch,
    test_results,
    train_results,
    loop.throughput,
    loop.variables,
    start.step,
  )


class _Loop:
  """One epoch of training, one evaluation."""

  def __init__(self, setup, model, optimizer, metrics):
    self.throughput = training_report.Throughput()
    self.variables = [
      *model.variables,
      *optimizer.variables,
      *metrics.variables,
    ]
    self._setup = setup
    self._options = setup.options
    self._data = setup.data
    self._metrics = metrics
    self._train_step = make_train_step(
      setup.strategy, model, optimizer, metrics
    )
    self._test_step = make_test_step(setup.strategy, model, metrics)
    self._test_set = setup.data.test(setup.strategy)

  def train_epoch(
    self, epoch, first_step, batches, after_step
  ) -> dict[str, float]:
    if not first_step:  # Else they count the steps before.
      self._metrics.reset()
    self.throughput.start_epoch()
    for step in range(first_step, self._data.steps_per_epoch):
      with self._setup.measured_step():
        self._train_step(batches)
      self.throughput.end_step(self._data.rows_in_step(step, epoch))
      if (
        self._options.verbose
        and (step + 1) % self._options.log_every_steps == 0
      ):
        self._print_step(epoch, step)
      after_step(epoch, step + 1)
    self.throughput.end_epoch()
    return self._metrics.results()

  def evaluate(self) -> dict[str, float]:
    self._metrics.reset()
    for batch in self._test_set:
      self._test_step(batch)
      self._setup.still_alive()
    return self._metrics.results()

  def _print_step(self, epoch, step) -> None:
    results = self._metrics.results()  # Every worker reads: each has a part.
    if not self._setup.is_chief:
      return
    print_step(epoch, step, self._data, results['loss'], self.throughput)


class Metrics:
  """Mean loss and accuracy over all rows that all replicas have seen.

  Made in the strategy's scope, each replica adds to a part of its own, and
  reading adds the parts up: exact however the rows are shared out. (With
  parameter servers there is one part, on a server.)
  """

  def __init__(self):
    self._loss = keras.metrics.Mean(name='loss')
    self._accuracy = keras.metrics.SparseCategoricalAccuracy(name='accuracy')

  @property
  def all(self) -> list[keras.metrics.Metric]:
    """The metrics."""
    return [self._loss, self._accuracy]

  @property
  def variables(self) -> list[keras.Variable]:
    """What the means are made of."""
    return [v for metric in self.all for v in metric.variables]

  def update(
    self, labels: tf.Tensor, logits: tf.Tensor, losses: tf.Tensor
  ) -> None:
    """Adds the rows of a replica's step."""
    self._loss.update_state(losses)
    self._accuracy.update_state(labels, logits)

  def results(self) -> dict[str, float]:
    """The means since the last reset."""
    return {m.name: float(m.result()) for m in self.all}

  def reset(self) -> None:
    """Forgets all rows."""
    for metric in self.all:
      metric.reset_state()


def make_replica_step(
  model: keras.Model,
  optimizer: keras.optimizers.Optimizer,
  metrics: Metrics,
  replicas: int,
) -> Callable:
  """Returns what a replica does with its part of a batch.

  Each replica's loss is the mean over its own rows, divided by the number of
  replicas. DistributedOptimizer weighs the gradients by rows, its default, so
  that their sum is the gradient of the mean over the global batch. The other
  way, `tf.nn.compute_average_loss` with weighting='none', needs to be told the
  number of rows in the batch, which the last one of an epoch does not share
  with the others.
  """

  def replica_step(batch):
    images, labels = batch
    with tf.GradientTape() as tape:
      logits = model(images, training=True)
      losses = keras.losses.sparse_categorical_crossentropy(
        labels, logits, from_logits=True
      )
      loss = tf.reduce_mean(losses)
      scaled_loss = optimizer.scale_loss(loss / replicas)
    gradients = tape.gradient(
      scaled_loss, [v.value for v in model.trainable_variables]
    )
    optimizer.apply(gradients, model.trainable_variables)
    metrics.update(labels, logits, losses)
    return loss

  return replica_step


def make_train_step(
  strategy: tf.distribute.Strategy,
  model: keras.Model,
  optimizer: keras.optimizers.Optimizer,
  metrics: Metrics,
) -> Callable:
  """Returns a graph that takes one global batch and trains on it."""
  replica_step = make_replica_step(
    model, optimizer, metrics, strategy.num_replicas_in_sync
  )

  @tf.function
  def train_step(batches):
    strategy.run(replica_step, args=(next(batches),))

  return train_step


def make_replica_test_step(model: keras.Model, metrics: Metrics) -> Callable:
  """Returns what a replica does to add its part of a batch to the metrics."""

  def replica_step(batch):
    images, labels = batch
    logits = model(images, training=False)
    losses = keras.losses.sparse_categorical_crossentropy(
      labels, logits, from_logits=True
    )
    metrics.update(labels, logits, losses)
    return tf.reduce_mean(losses)

  return replica_step


def make_test_step(
  strategy: tf.distribute.Strategy, model: keras.Model, metrics: Metrics
) -> Callable:
  """Returns a graph that adds one batch to the metrics."""
  replica_step = make_replica_test_step(model, metrics)

  @tf.function
  def test_step(batch):
    strategy.run(replica_step, args=(batch,))

  return test_step


def print_step(
  epoch: int,
  step: int,
  data: mnist_common.TrainingData,
  loss: float,
  throughput: training_report.Throughput,
) -> None:
  """Shows how far an epoch has come; both numbers count from 0."""
  rate = throughput.current
  print(
    f'epoch {epoch + 1}, step {step + 1}/{data.steps_per_epoch}: '
    f'loss {loss:.4f}, '
    f'{"- " if rate is None else f"{rate:,.0f} "}examples/s',
    flush=True,
  )


def _print_epoch(epoch, epochs, train_results, test_results) -> None:
  print(
    f'epoch {epoch + 1}/{epochs}: '
    f'train loss {train_results["loss"]:.4f}, '
    f'accuracy {train_results["accuracy"]:.4f}; '
    f'test loss {test_results["loss"]:.4f}, '
    f'accuracy {test_results["accuracy"]:.4f}',
    flush=True,
  )


if __name__ == '__main__':
  command_line.run(train)
