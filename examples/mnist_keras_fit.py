"""Trains on MNIST with Keras' `fit`, under every strategy.

  python examples/mnist_keras_fit.py --strategy=ring_mirrored \\
    --num_virtual_devices=4 --dataset=digits

trains on four logical CPUs and the digits of scikit-learn, offline. On several
workers (with --elastic the others continue when one dies) and with parameter
servers, every task runs the same command:

  tfs launch --num_workers=2 -- \\
    python examples/mnist_keras_fit.py --strategy=multi_worker_ring \\
    --dataset=digits
  tfs launch --num_workers=2 --num_ps=2 --chief -- \\
    python examples/mnist_keras_fit.py --strategy=parameter_server \\
    --dataset=digits --mode=sync

With --checkpoint_dir an interrupted run continues where it was, after an epoch
or, on SIGTERM, after a step, with the same result to the last bit.
"""

import os
import sys

from absl import flags

if not __package__:  # Run as a file: the packages are one directory up.
  sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  )

import tf_strategies as tfs
from examples import common

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)  # `--help` shows them too.
flags.DEFINE_bool('elastic', False, 'multi_worker_ring: survive lost workers.')
flags.DEFINE_integer(
  'min_workers',
  None,
  'With --elastic: the fewest workers; by default a majority goes on.',
  1,
)
flags.DEFINE_integer('steps_per_execution', 1, 'Steps in a call of Keras.', 1)


def build_model(strategy, num_classes):
  """Returns the compiled model, with its variables placed by the strategy."""
  import keras

  keras.utils.set_random_seed(FLAGS.seed)
  keras.config.set_dtype_policy(FLAGS.mixed_precision)
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.Input([28, 28, 1]),
        *common.hidden_layers(),
        keras.layers.Dropout(FLAGS.dropout),
        # Float32 in mixed precision too: a 16-bit softmax loses the tail.
        keras.layers.Dense(num_classes, dtype='float32', name='logits'),
      ],
      name=FLAGS.model,
    )
    model.compile(
      common.build_optimizer(strategy),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
      steps_per_execution=FLAGS.steps_per_execution,
      # XLA compiles the step of one replica, but none that communicates: one
      # device and several would not run the same kernels.
      jit_compile=False,
    )
    model.optimizer.build(model.trainable_variables)
  return model


def train_batches(strategy, data, start=(0, 0)):
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
  return make()  # `fit` distributes it.


def test_batches(data):
  """Returns the batches of the test split, in order."""
  options = tfs.data.PipelineOptions(global_batch_size=512)
  return tfs.data.make_dataset(data.test, options, training=False)


def train(job=None):
  """Trains in this task, or in an elastic job; returns the report."""
  from examples import datasets, reporting

  strategy = job.strategy if job else common.create_strategy()
  data = datasets.load(FLAGS.dataset, FLAGS.data_path)
  model = build_model(strategy, data.num_classes)
  start, runs = (0, 0), []
  if job:
    job.restore(model)
    start = tuple(job.position)
  elif FLAGS.checkpoint_dir:
    settings = common.checkpoint_settings(strategy, data)
    runs = [tfs.Run(FLAGS.checkpoint_dir, model, settings=settings)]
    start = tuple(runs[0].restore())

  measured = reporting.Run('mnist_keras_fit', strategy, data, start)
  options = {
    'epochs': FLAGS.epochs,
    'steps_per_epoch': common.steps_per_epoch(data),
    'validation_data': test_batches(data),
    # The others see the step after which the last one exits.
    'callbacks': [*measured.callbacks(), *runs],
    'verbose': 2 if measured.is_shown else 0,
  }
  if job:
    history = job.fit(
      model, lambda *start: train_batches(strategy, data, start), **options
    )
  elif start[0] < FLAGS.epochs:  # The run skips completed steps.
    batches = train_batches(strategy, data, (start[0], 0))
    history = model.fit(batches, initial_epoch=start[0], **options)
  else:
    history = None
    with runs[0]:  # An evaluator may still wait for its end.
      pass

  trained, tested = reporting.last_results(history)
  if not tested:  # Every epoch had been done before.
    tested = model.evaluate(test_batches(data), return_dict=True, verbose=0)
  return measured.report(model, model.optimizer, model.metrics, trained, tested)


def main():
  """Does the part of this task: it trains, serves variables or evaluates."""
  if FLAGS.elastic:
    options = tfs.ElasticOptions(min_workers=FLAGS.min_workers)
    return tfs.elastic.run(train, options, devices=common.devices())
  return tfs.cluster.run_task(
    train, lambda: common.evaluate_checkpoints(build_model, test_batches)
  )


if __name__ == '__main__':
  common.run(main)
