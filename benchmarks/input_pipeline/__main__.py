"""Measures input pipelines beside each other, and says what bounds each.

  python -m benchmarks.input_pipeline --data_path=mnist.npz
  python -m benchmarks.input_pipeline --dataset=digits --first_byte_ms=10 \
    --variants=extract_alone,extract_alone_parallel,cache,cache_fast_storage
  python -m benchmarks.input_pipeline --dataset=digits --batch_size=64 \
    --train_step_ms=5 --timeline=steps.png --variants=naive,prefetch
  python -m benchmarks.input_pipeline --pipeline=my_program.input:dataset

Each variant runs in a process of its own; rounds take turns. Items are rows of
the first component of a batch. 'first batch' is from making the iterator, 'CPU'
of all threads and child processes, 'RSS' with TensorFlow. 'bound by' is told of
an epoch after the timed ones; `stages` and `verdict` say how.
"""

import sys

from absl import app, flags

from benchmarks.input_pipeline import command
from examples.datasets import sources
from tf_strategies import errors


def define_flags():
  """Defines the command's flags; called by the command alone."""
  flags.DEFINE_enum('dataset', 'mnist', sources.DATASETS, 'What to read.')
  flags.DEFINE_string(
    'data_path', None, 'MNIST, as an .npz file or a directory.'
  )
  flags.DEFINE_string(
    'tfrecord_dir',
    None,
    'Shards of the same data; written if there are none. Without it, written '
    'to a temporary directory.',
  )
  flags.DEFINE_integer('num_files', 16, 'Shards to write.', lower_bound=1)
  flags.DEFINE_integer('batch_size', 256, 'Of each batch.', lower_bound=1)
  flags.DEFINE_list('variants', None, 'Which rows; all of them by default.')
  flags.DEFINE_integer('rounds', 5, 'Epochs of each variant.', lower_bound=1)
  flags.DEFINE_string(
    'pipeline',
    None,
    'module:function that returns your tf.data.Dataset, to measure instead.',
  )
  flags.DEFINE_integer(
    'steps', 200, 'Batches of a --pipeline without end.', lower_bound=1
  )
  flags.DEFINE_string(
    'torch_python',
    None,
    "An interpreter that has torch; by default this one, if it has it. '' for "
    'none.',
  )
  flags.DEFINE_float(
    'first_byte_ms',
    0.0,
    'Simulated wait when a shard is opened.',
    lower_bound=0.0,
  )
  flags.DEFINE_float(
    'storage_mb_per_s',
    None,
    'Simulated throughput of each reader.',
    lower_bound=1e-3,
  )
  flags.DEFINE_float(
    'train_step_ms', 0.0, 'Simulated training step.', lower_bound=0.0
  )
  flags.DEFINE_string(
    'timeline', None, 'Draw the first steps to this .png or .html file.'
  )
  flags.DEFINE_integer(
    'timeline_steps', 20, 'How many steps to draw.', lower_bound=1
  )
  flags.DEFINE_bool('stages', False, 'Show the stages of each variant.')
  flags.DEFINE_string('report_json', None, 'Write everything to this file.')
  flags.DEFINE_float(
    'deadline', 120.0, 'Seconds that an epoch may take.', lower_bound=1.0
  )


def main(argv):
  """Measures and tells; 1 if anything failed."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
  try:
    return command.run(command.Settings.of_flags(flags.FLAGS))
  except errors.Error as e:
    # The sentence is made for the user; a traceback would bury it.
    print(e, file=sys.stderr)
    return 1


if __name__ == '__main__':
  define_flags()
  app.run(main)
