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
    metrics = _Metrics()
  checkpoint, first_epoch = checkpointing.open_run(setup, model, optimizer)
  loop = _Loop(setup, model, optimizer, metrics)
  logger = training_report.ScalarLogger(
    options.log_dir if setup.is_chief else None
  )

  batches = iter(setup.data.train(setup.strategy, first_epoch, options.epochs))
  train_results = test_results = None
  for epoch in range(first_epoch, options.epochs):
    train_results = loop.train_epoch(epoch, batches)
    test_results = loop.evaluate()
    if options.verbose and setup.is_chief:
      _print_epoch(epoch, options.epochs, train_results, test_results)
    logger.write(epoch, train=train_results, test=test_results)
    if checkpoint is not None and setup.is_chief:
      checkpoint.save(epochs_done=epoch + 1)
  if test_results is None:  # Every epoch had been done before.
    test_results = loop.evaluate()

  if options.save_weights:
    variables = checkpointing.state_variables(model, optimizer)
    training_report.write_weights(
      variables, options.save_weights, setup.strategy
    )
  outcome = training_report.Outcome(
    first_epoch, test_results, train_results, loop.throughput
  )
  return training_report.build('mnist_custom_loop', setup, model, outcome)


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
    rate = self.throughput.current
    print(
      f'epoch {epoch + 1}, step {step + 1}/{self._data.steps_per_epoch}: '
      f'loss {results["loss"]:.4f}, '
      f'{"- " if rate is None else f"{rate:,.0f} "}examples/s',
      flush=True,
    )


class _Metrics:
  """Mean loss and accuracy over all rows that all replicas have seen.

  Made in the strategy's scope, each replica adds to a part of its own, and
  reading adds the parts up: exact however the rows are shared out.
  """

  def __init__(self):
    self._loss = keras.metrics.Mean(name='loss')
    self._accuracy = keras.metrics.SparseCategoricalAccuracy(name='accuracy')

  def update(self, labels, logits, losses):
    self._loss.update_state(losses)
    self._accuracy.update_state(labels, logits)

  def results(self) -> dict[str, float]:
    return {m.name: float(m.result()) for m in (self._loss, self._accuracy)}

  def reset(self):
    for metric in (self._loss, self._accuracy):
      metric.reset_state()


def make_train_step(
  strategy: tf.distribute.Strategy,
  model: keras.Model,
  optimizer: keras.optimizers.Optimizer,
  metrics: _Metrics,
) -> Callable:
  """Returns a graph that takes one global batch and trains on it.

  Each replica's loss is the mean over its own rows, divided by the number of
  replicas. DistributedOptimizer weighs the gradients by rows, its default, so
  that their sum is the gradient of the mean over the global batch. The other
  way, `tf.nn.compute_average_loss` with weighting='none', needs to be told the
  number of rows in the batch, which the last one of an epoch does not share
  with the others.
  """
  replicas = strategy.num_replicas_in_sync

  def replica_step(batch):
    images, labels = batch
    with tf.GradientTape() as tape:
      logits = model(images, training=True)
      losses = keras.losses.sparse_categorical_crossentropy(
        labels, logits, from_logits=True
      )
      loss = optimizer.scale_loss(tf.reduce_mean(losses) / replicas)
    gradients = tape.gradient(
      loss, [v.value for v in model.trainable_variables]
    )
    optimizer.apply(gradients, model.trainable_variables)
    metrics.update(labels, logits, losses)

  @tf.function
  def train_step(batches):
    strategy.run(replica_step, args=(next(batches),))

  return train_step


def make_test_step(
  strategy: tf.distribute.Strategy, model: keras.Model, metrics: _Metrics
) -> Callable:
  """Returns a graph that adds one batch to the metrics."""

  def replica_step(batch):
    images, labels = batch
    logits = model(images, training=False)
    losses = keras.losses.sparse_categorical_crossentropy(
      labels, logits, from_logits=True
    )
    metrics.update(labels, logits, losses)

  @tf.function
  def test_step(batch):
    strategy.run(replica_step, args=(batch,))

  return test_step


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
