r"""Converts all or only changed source files to TFRecord shards.

  python -m examples.datasets.extract --source=mnist.npz \
    --output_dir=mnist_tfrecords --mode=partial

Your own files, with a function that yields the examples of a file:

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
  """Defines the flags of the command."""
  flags.DEFINE_multi_string(
    'source',
    None,
    'A file, a pattern or a directory. May be given several times.',
    required=True,
  )
  flags.DEFINE_string('output_dir', None, 'Output directory.', required=True)
  flags.DEFINE_enum(
    'mode', 'partial', MODES, 'Convert only changed files, or all.'
  )
  flags.DEFINE_string(
    'convert',
    None,
    'module:function that yields the examples of a file. By default the '
    'formats of MNIST are read.',
  )
  flags.DEFINE_string(
    'name', 'mnist', 'Name of the data set, in names of shards.'
  )
  flags.DEFINE_enum(
    'split', 'train', SPLITS, 'Split of the examples of --convert.'
  )
  flags.DEFINE_bool(
    'checksum',
    False,
    'Also compare the checksums of files whose size and time are unchanged.',
  )
  flags.DEFINE_integer(
    'examples_per_shard',
    EXAMPLES_PER_SHARD,
    'Maximum number of examples in a shard.',
    lower_bound=1,
  )


def main(argv):
  """Extracts, and prints the report."""
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
    # The message is meant for users. A traceback would hide it.
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
