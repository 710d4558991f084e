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

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from examples import (
  checkpointing,
  command_line,
  common_flags,
  mnist_common,
  mnist_model,
  training_report,
)


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
  checkpoint, first_epoch = checkpointing.open_run(setup, model, optimizer)
  loop = _Loop(setup, model, optimizer, metrics)
  batches = setup.data.train(setup.strategy, first_epoch, options.epochs)
  outcome = run_epochs(setup, loop, checkpoint, first_epoch, batches)

  if options.save_weights:
    variables = checkpointing.state_variables(model, optimizer)
    training_report.write_weights(
      variables, options.save_weights, setup.strategy
    )
  return training_report.build('mnist_custom_loop', setup, model, outcome)


def run_epochs(
  setup: mnist_common.Setup,
  loop,
  checkpoint: checkpointing.RunCheckpoint | None,
  first_epoch: int,
  batches,
) -> training_report.Outcome:
  """Trains epoch by epoch; shows, logs and saves each.

  Args:
    setup: of the run.
    loop: has `train_epoch(epoch, iterator)` and `evaluate()`, which return loss
      and accuracy, and a `throughput`.
    checkpoint: where each epoch is saved, if it is.
    first_epoch: epochs that are done.
    batches: of all epochs from there on, distributed over the strategy.
  """
  options = setup.options
  logger = training_report.ScalarLogger(
    options.log_dir if setup.is_chief else None
  )
  iterator = iter(batches)
  train_results = test_results = None
  for epoch in range(first_epoch, options.epochs):
    train_results = loop.train_epoch(epoch, iterator)
    test_results = loop.evaluate()
    if options.verbose and setup.is_chief:
      _print_epoch(epoch, options.epochs, train_results, test_results)
    logger.write(epoch, train=train_results, test=test_results)
    if checkpoint is not None and setup.is_chief:
      checkpoint.save(epochs_done=epoch + 1)
  if test_results is None:  # Every epoch had been done before.
    test_results = loop.evaluate()
  return training_report.Outcome(
    first_epoch, test_results, train_results, loop.throughput
  )


class _Loop:
  """One epoch of training, one evaluation."""

  def __init__(self, setup, model, optimizer, metrics):
    self.throughput = training_report.Throughput()
    self._options = setup.options
    self._is_chief = setup.is_chief
    self._data = setup.data
    self._metrics = metrics
    self._train_step = make_train_step(
      setup.strategy, model, optimizer, metrics
    )
    self._test_step = make_test_step(setup.strategy, model, metrics)
    self._test_set = setup.data.test(setup.strategy)

  def train_epoch(self, epoch, batches) -> dict[str, float]:
    self._metrics.reset()
    self.throughput.start_epoch()
    for step in range(self._data.steps_per_epoch):
      self._train_step(batches)
      self.throughput.end_step(self._data.rows_in_step(step))
      if (
        self._options.verbose
        and (step + 1) % self._options.log_every_steps == 0
      ):
        self._print_step(epoch, step)
    self.throughput.end_epoch()
    return self._metrics.results()

  def evaluate(self) -> dict[str, float]:
    self._metrics.reset()
    for batch in self._test_set:
      self._test_step(batch)
    return self._metrics.results()

  def _print_step(self, epoch, step) -> None:
    results = self._metrics.results()  # Every worker reads: each has a part.
    if not self._is_chief:
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

  def update(
    self, labels: tf.Tensor, logits: tf.Tensor, losses: tf.Tensor
  ) -> None:
    """Adds the rows of a replica's step."""
    self._loss.update_state(losses)
    self._accuracy.update_state(labels, logits)

  def results(self) -> dict[str, float]:
    """The means since the last reset."""
    return {m.name: float(m.result()) for m in (self._loss, self._accuracy)}

  def reset(self) -> None:
    """Forgets all rows."""
    for metric in (self._loss, self._accuracy):
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
