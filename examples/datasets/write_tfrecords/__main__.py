"""Writes a data set as TFRecord shards.

  python -m examples.datasets.write_tfrecords \
    --data_path=mnist.npz --output_dir=mnist_tfrecords --num_shards=4
"""

import sys

from absl import app, flags

from examples.datasets import sources
from examples.datasets.write_tfrecords import write_tfrecords
from tf_strategies import errors


def define_flags():
  """Defines the command's flags; called by the command alone.

  Importing a module must not define `data_path` for a program that has its own.
  """
  flags.DEFINE_enum(
    'dataset', 'mnist', sources.DATASETS, 'Which data set to write.'
  )
  flags.DEFINE_string(
    'data_path',
    None,
    'An .npz file or a directory of IDX files; without it, MNIST comes from '
    'the Keras cache or its download.',
  )
  flags.DEFINE_string('output_dir', None, 'Where to write.', required=True)
  flags.DEFINE_integer('num_shards', 4, 'Shards of each split.', lower_bound=1)


def main(argv):
  """Loads, writes, and tells what it did."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
  args = flags.FLAGS
  try:
    data = sources.load(args.dataset, args.data_path)
    paths = write_tfrecords(
      data, args.output_dir, args.num_shards, progress=print
    )
  except errors.Error as e:
    # The sentence is made for the user; a traceback would bury it.
    print(e, file=sys.stderr)
    return 1
  print(
    f'Wrote {len(data.train)} + {len(data.test)} examples of {data.name} to '
    f'{len(paths)} files in {args.output_dir}.'
  )
  return 0


if __name__ == '__main__':
  define_flags()
  app.run(main)
