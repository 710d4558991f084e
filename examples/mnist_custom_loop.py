"""Trains on MNIST with a custom training loop, under every strategy.

  python examples/mnist_custom_loop.py --strategy=ring_mirrored \\
    --num_virtual_devices=4 --dataset=digits

does what mnist_keras_fit.py does, with the same flags, and shows each part: the
distributed batches, a step that is written for one device, metrics, checkpoints. On parameter servers whose workers read the data
themselves, none of them more than two steps ahead of the slowest:

  tfs launch --num_workers=2 --num_ps=2 --chief -- \\
    python examples/mnist_custom_loop.py --strategy=parameter_server \\
    --dataset=digits --mode=bounded --max_staleness=2 --worker_input
"""

import os
import sys
from contextlib import nullcontext

from absl import flags

if not __package__:  # Run as a file: the packages are one directory up.
  sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  )

import tf_strategies as tfs
from examples import common

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)  # `--help` shows them too.


def build_model(num_classes):
  """Returns the model, which ends in logits."""
  import keras

  keras.utils.set_random_seed(FLAGS.seed)
  keras.config.set_dtype_policy(FLAGS.mixed_precision)
  return keras.Sequential(
    [
      keras.Input([28, 28, 1]),
      *common.hidden_layers(),
      keras.layers.Dropout(FLAGS.dropout),
      # Float32 in mixed precision too: a 16-bit softmax loses the tail.
      keras.layers.Dense(num_classes, dtype='float32', name='logits'),
    ],
    name=FLAGS.model,
  )


def train_batches(strategy, data, start):
  """Returns the batches from (epoch, step) on, in the order of an unbroken run."""

  def make(context=None):
    return tfs.data.make_dataset(
      data.train,
      common.pipeline_options(),
      training=True,
      epochs=FLAGS.epochs,
      start=start,
      steps_per_epoch=common.steps_per_epoch(data),
      input_context=context,
    )

  if FLAGS.worker_input:  # Each worker reads its part itself.
    return strategy.distribute_datasets_from_function(make)
  return strategy.experimental_distribute_dataset(make())


def test_batches(data):
  """Returns the batches of the test split, in order."""
  options = tfs.data.PipelineOptions(global_batch_size=512)
  return tfs.data.make_dataset(data.test, options, training=False)


def on_replicas(strategy, step, optimizers=()):
  """Returns a function that takes the next batch and computes `step` on it."""
  import tensorflow as tf

  if common.has_step(strategy):
    whole_step = strategy.step(step, optimizers)
    return lambda batches: whole_step(next(batches))
  return tf.function(lambda batches: strategy.run(step, (next(batches),)))


def resume(strategy, data, model, optimizer, metrics):
  """Returns the run in `--checkpoint_dir`, if any, and the epoch and step to start at."""
  if not FLAGS.checkpoint_dir:
    return None, (0, 0)
  settings = common.checkpoint_settings(strategy, data)
  run = tfs.Run(FLAGS.checkpoint_dir, model, optimizer, settings, metrics)
  epoch, step = run.restore()
  # Parameter servers count the steps of all epochs.
  steps = common.steps_per_epoch(data)
  return run, divmod(epoch * steps + step, steps)


def train():
  """Trains in this task; returns the report."""
  import keras
  import tensorflow as tf

  from examples import datasets, reporting

  strategy = common.create_strategy()
  data = datasets.load(FLAGS.dataset, FLAGS.data_path)
  steps = common.steps_per_epoch(data)
  with strategy.scope():
    model = build_model(data.num_classes)
    optimizer = common.build_optimizer(strategy)
    optimizer.build(model.trainable_variables)
    mean_loss = keras.metrics.Mean(name='loss')
    accuracy = keras.metrics.SparseCategoricalAccuracy(name='accuracy')
  metrics = [mean_loss, accuracy]

  def test_step(batch, training=False):
    images, labels = batch
    logits = model(images, training=training)
    losses = keras.losses.sparse_categorical_crossentropy(
      labels, logits, from_logits=True
    )
    mean_loss.update_state(losses)
    accuracy.update_state(labels, logits)
    return tf.reduce_mean(losses)

  def train_step(batch):
    with tf.GradientTape() as tape:
      loss = test_step(batch, training=True)
      # Divided by 1, unless replicas run the step: they add up their means.
      loss = optimizer.scale_loss(loss / strategy.num_replicas_in_sync)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(loss, [v.value for v in weights]), weights)
    return loss

  def reset():
    for metric in metrics:
      metric.reset_state()

  def results():
    return {metric.name: float(metric.result()) for metric in metrics}

  def evaluate():
    batches = test_batches(data)
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    reset()
    for _ in range(int(batches.cardinality())):
      test(iterator)
    return results()

  run, start = resume(strategy, data, model, optimizer, metrics)
  measured = reporting.Run('mnist_custom_loop', strategy, data, start)
  train = on_replicas(strategy, train_step, [optimizer])
  test = on_replicas(strategy, test_step)
  trained = tested = None
  with measured, run or nullcontext():
    batches = iter(train_batches(strategy, data, start))
    for epoch in range(start[0], FLAGS.epochs):
      first = start[1] if epoch == start[0] else 0
      if not first:  # Else the metrics were restored too.
        reset()
      measured.begin_epoch(epoch)
      for step in range(first, steps):
        with measured.step(step):
          train(batches)
        # Evaluation takes long: workers ask each other before it.
        if run:
          run.exit_if_preempted(epoch, step + 1, at_once=step + 1 == steps)
      if FLAGS.local_steps:
        optimizer.meet()
      measured.end_epoch()
      trained, tested = results(), evaluate()
      measured.log_epoch(epoch, trained, tested)
      if run:
        run.save(epoch + 1)
  return measured.report(
    model, optimizer, metrics, trained, tested or evaluate()
  )


def main():
  """Does the part of this task: it trains, serves variables or evaluates."""
  return tfs.cluster.run_task(
    train,
    lambda: common.evaluate_checkpoints(
      lambda strategy, num_classes: build_model(num_classes), test_batches
    ),
  )


if __name__ == '__main__':
  common.run(main)
