r"""Converts source files to TFRecord shards, all of them or those that changed.

  python -m examples.datasets.extract --source=mnist.npz \
    --output_dir=mnist_tfrecords --mode=partial

Files of your own, by a function that yields the examples of one:

  python -m examples.datasets.extract --source='raw/*.csv' \
    --convert=my_package.my_module:convert --name=flights --output_dir=flights
"""

import sys

from absl import app, flags

from examples.datasets import user_function
from examples.datasets.extract import EXAMPLES_PER_SHARD, MODES, extract
from examples.datasets.tfrecord import SPLITS
from tf_strategies import errors


def define_flags():
  """Defines the command's flags; called by the command alone."""
  flags.DEFINE_multi_string(
    'source',
    None,
    'A file, a pattern or a directory; may be given several times.',
    required=True,
  )
  flags.DEFINE_string('output_dir', None, 'Where to write.', required=True)
  flags.DEFINE_enum(
    'mode', 'partial', MODES, 'Convert what has changed, or everything.'
  )
  flags.DEFINE_string(
    'convert',
    None,
    'module:function that yields the examples of a file; without it, the '
    'formats of MNIST.',
  )
  flags.DEFINE_string('name', 'mnist', 'Of the data set, in names of shards.')
  flags.DEFINE_enum(
    'split', 'train', SPLITS, 'Of the examples that --convert yields.'
  )
  flags.DEFINE_bool(
    'checksum',
    False,
    'Read files whose size and time are as before, too, to see whether they '
    'are the same.',
  )
  flags.DEFINE_integer(
    'examples_per_shard',
    EXAMPLES_PER_SHARD,
    'Where a shard ends and the next begins.',
    lower_bound=1,
  )


def main(argv):
  """Extracts, and prints the result."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
  args = flags.FLAGS
  try:
    report = extract(
      args.source,
      args.output_dir,
      user_function.find('convert', args.convert) if args.convert else None,
      mode=args.mode,
      name=args.name,
      split=args.split,
      checksum=args.checksum,
      examples_per_shard=args.examples_per_shard,
      progress=lambda line: print(line, flush=True),
    )
  except errors.Error as e:
    # The sentence is made for the user; a traceback would bury it.
    print(e, file=sys.stderr)
    return 1
  print(
    f'{len(report.converted)} converted, {len(report.unchanged)} unchanged, '
    f'{len(report.removed)} removed: {report.examples} examples in '
    f'{report.shards} shards in {args.output_dir}.'
  )
  return 0


if __name__ == '__main__':
  define_flags()
  app.run(main)
