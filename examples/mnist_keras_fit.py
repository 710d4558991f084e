"""Trains on MNIST with Keras's `fit`, under every strategy.

  python examples/mnist_keras_fit.py --strategy=ring_mirrored \\
    --num_virtual_devices=4 --dataset=digits

This command trains offline, on four logical CPUs, with the digits of scikit-learn. The
next commands train on several workers, and on parameter servers. With --elastic, the
other workers continue when one dies:

  tfs launch --num_workers=2 -- \\
    python examples/mnist_keras_fit.py --strategy=multi_worker_ring \\
    --dataset=digits
  tfs launch --num_workers=2 --num_ps=2 --chief -- \\
    python examples/mnist_keras_fit.py --strategy=parameter_server \\
    --dataset=digits --mode=sync

With --checkpoint_dir, an interrupted run resumes after the last epoch. After SIGTERM, it
resumes after the last step. The result is bit-identical to an uninterrupted run.
"""

import os
import sys

from absl import flags

if not __package__:  # Run as a file: the packages are one directory up.
  sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))

import tf_strategies as tfs
from examples import common

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)  # `--help` shows them too.
flags.DEFINE_bool('elastic', False, 'multi_worker_ring: survive lost workers.')
flags.DEFINE_integer(
  'min_workers',
  None,
  'With --elastic: minimum number of workers. Default: a majority.',
  1,
)
flags.DEFINE_integer('steps_per_execution', 1, 'Steps per call of Keras.', 1)


@flags.multi_flags_validator(
  ['elastic', 'strategy', 'checkpoint_dir'],
  '--elastic works with --strategy=multi_worker_ring, and without '
  '--checkpoint_dir: an elastic job keeps its state in its workers.',
)
def _check_elastic(values):
  is_ring = values['strategy'] == 'multi_worker_ring'
  return not values['elastic'] or (is_ring and not values['checkpoint_dir'])


def build_model(strategy, num_classes):
  """Returns the compiled model, whose variables the strategy places."""
  import keras

  with strategy.scope():
    model = common.build_model(num_classes)
    model.compile(
      common.build_optimizer(),
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
      steps_per_execution=FLAGS.steps_per_execution,
      # On GPUs Keras compiles only under some strategies. Without compilation their
      # results differ less and can be compared.
      jit_compile=False,
    )
  return model


def train(job=None):
  """Trains in this task or in an elastic job. Returns the report."""
  strategy = job.strategy if job else common.create_strategy()
  data = common.load_data(FLAGS.steps_per_execution)
  model = build_model(strategy, data.num_classes)
  run, start = common.resume(data, model)
  if job:
    job.restore(model)  # A worker that joins gets the state of the others.
    start = tuple(job.position)
  options = {
    'epochs': FLAGS.epochs,
    'steps_per_epoch': FLAGS.steps_per_epoch,
    'validation_data': common.test_batches(data),
    # The run is last, so that other callbacks see the step before it may exit.
    'callbacks': [*common.callbacks(strategy), *([run] if run else [])],
    'verbose': common.verbosity(strategy),
  }
  if job:  # Creates the batches again when the group of workers changes.
    history = job.fit(
      model,
      lambda *start: common.train_batches(strategy, data, start),
      **options,
    )
  else:  # The run skips the completed steps of the first epoch.
    batches = common.train_batches(strategy, data, (start[0], 0))
    history = model.fit(batches, initial_epoch=start[0], **options)
  logs = {name: values[-1] for name, values in history.history.items()}
  if not logs:  # All epochs were completed in an earlier run.
    found = model.evaluate(common.test_batches(data), return_dict=True)
    logs = {f'val_{name}': value for name, value in found.items()}
  return common.report(data, model, model.metrics, logs, start)


def main():
  """Runs this task: trains, serves variables or evaluates."""
  if FLAGS.elastic:
    options = tfs.ElasticOptions(min_workers=FLAGS.min_workers)
    return tfs.elastic.run(train, options, devices=common.devices())
  return tfs.cluster.run_task(train, common.evaluate_checkpoints)


if __name__ == '__main__':
  common.run(main)
