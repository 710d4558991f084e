"""Trains on MNIST with a custom training loop, under every strategy.

  python examples/mnist_custom_loop.py --strategy=ring_mirrored \\
    --num_virtual_devices=4 --dataset=digits

It trains like mnist_keras_fit.py, with the same flags. It shows each part of a loop:
distributed batches, a step that is written for one device, metrics and checkpoints.

The next command trains on parameter servers. Workers read the data themselves, and are
at most two steps ahead of the slowest worker:

  tfs launch --num_workers=2 --num_ps=2 --chief -- \\
    python examples/mnist_custom_loop.py --strategy=parameter_server \\
    --dataset=digits --mode=bounded --max_staleness=2 --worker_input
"""

import contextlib
import os
import sys

from absl import flags

if not __package__:  # Run as a file: the packages are one directory up.
  sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))

import tf_strategies as tfs
from examples import common

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)  # `--help` shows them too.


def train():
  """Trains in this task. Returns the report."""
  import keras
  import tensorflow as tf

  strategy = common.create_strategy()
  data = common.load_data()
  steps = FLAGS.steps_per_epoch
  with strategy.scope():
    model = common.build_model(data.num_classes)
    model.compile(common.build_optimizer())  # For callbacks and checkpoints.
    optimizer = model.optimizer
    mean_loss = keras.metrics.Mean(name='loss')
    accuracy = keras.metrics.SparseCategoricalAccuracy(name='accuracy')
  metrics = [mean_loss, accuracy]

  def test_step(batch, training=False):
    images, labels = batch
    logits = model(images, training=training)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    mean_loss.update_state(losses)
    accuracy.update_state(labels, logits)
    return tf.reduce_mean(losses)

  def train_step(batch):
    with tf.GradientTape() as tape:
      loss = test_step(batch, training=True)
      # The step sees the whole batch, so this divides by 1. Under TensorFlow's
      # strategies each replica runs the step, and gradients are summed.
      loss = optimizer.scale_loss(loss / strategy.num_replicas_in_sync)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)

  def reset():
    for metric in metrics:
      metric.reset_state()

  def results(prefix=''):  # Called on all workers: each has a part of a metric.
    return {f'{prefix}{m.name}': float(m.result()) for m in metrics}

  def evaluate():
    reset()
    batches = common.test_batches(data)
    for batch in strategy.experimental_distribute_dataset(batches):
      test(batch)
    return results('val_')

  train = strategy.step(train_step, [optimizer])
  test = strategy.step(test_step)
  run, start = common.resume(data, model, metrics)
  callbacks = common.callback_list(strategy, model)
  batches = common.train_batches(strategy, data, start)
  if not FLAGS.worker_input:
    batches = strategy.experimental_distribute_dataset(batches)
  iterator, logs = iter(batches), None
  with run or contextlib.nullcontext():
    callbacks.on_train_begin()
    for epoch in range(start[0], FLAGS.epochs):
      first = start[1] if epoch == start[0] else 0
      if not first:  # Otherwise the metrics were restored too.
        reset()
      callbacks.on_epoch_begin(epoch)
      for step in range(first, steps):
        callbacks.on_train_batch_begin(step)
        train(next(iterator))
        callbacks.on_train_batch_end(step)
        # Checks for preemption before the evaluation, which takes long.
        if run:
          run.exit_if_preempted(epoch, step + 1, at_once=step + 1 == steps)
      common.end_epoch(strategy, optimizer)
      logs = {**results(), **evaluate()}
      callbacks.on_epoch_end(epoch, logs)
      if run:
        run.save(epoch + 1)
    callbacks.on_train_end()
  return common.report(data, model, metrics, logs or evaluate(), start)


def main():
  """Runs this task: trains, serves variables or evaluates."""
  return tfs.cluster.run_task(train, common.evaluate_checkpoints)


if __name__ == '__main__':
  common.run(main)
