"""Extract: the records of many files, read in parallel, in an order that holds.

Example:

  >>> import os, tempfile
  >>> import tensorflow as tf
  >>> from tf_strategies.data import files
  >>> with tempfile.TemporaryDirectory() as directory:
  ...   for i in range(3):
  ...     path = os.path.join(directory, f'{i}.tfrecord')
  ...     with tf.io.TFRecordWriter(path) as writer:
  ...       for j in range(2):
  ...         writer.write(b'%d%d' % (i, j))
  ...   found = files.find(os.path.join(directory, '*.tfrecord'))
  ...   print(found.num_records)
  ...   in_order = files.read(found.paths, found, cycle=3, in_order=True)
  ...   print([record.decode() for record in in_order.as_numpy_iterator()])
  6
  ['00', '01', '10', '11', '20', '21']
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import manifest as manifest_lib
from tf_strategies.data import plan as plan_lib
from tf_strategies.data import shuffle, tfrecord

# A path (scalar string tensor) -> a data set of the records in that file.
ReadFn = Callable[[tf.Tensor], tf.data.Dataset]

MAX_OPEN_FILES = 16
# Records taken from one file before the next: one at a time costs a third of
# the throughput. Evaluation restores the written order instead.
_BLOCK_LENGTH = 16


@dataclasses.dataclass(frozen=True)
class Files:
  """Files of records, and what is known of them.

  Attributes:
    name: of the data; part of the names of caches.
    paths: where, in order.
    counts: the records of each.
    is_dealt: whether record i is in file i % len(paths); else the first file
      holds the first records.
    identity: changes when the content of a file does, one value a path.
    read_fn: reads one file; None for TFRecords.
    selection: what the user chose the files by, if a name does not say it.
  """

  name: str
  paths: tuple[str, ...]
  counts: tuple[int, ...]
  is_dealt: bool = False
  identity: tuple[object, ...] = ()
  read_fn: ReadFn | None = None
  selection: tuple[str, ...] = ()

  @property
  def num_records(self) -> int:
    """The records of all files."""
    return sum(self.counts)

  def share(self, plan: plan_lib.Plan) -> Files:
    """The files that one input pipeline reads."""
    return dataclasses.replace(
      self,
      paths=plan.files_of(self.paths),
      counts=plan.files_of(self.counts),
      identity=plan.files_of(self.identity),
    )


def find(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  split: str = 'train',
  read_fn: ReadFn | None = None,
  counts: Sequence[int] | None = None,
) -> Files:
  """Finds files and counts their records.

  Args:
    paths: the files; or a pattern, such as 'logs/*.tfrecord'; or a directory
      that `extract` filled.
    split: of such a directory.
    read_fn: reads one file; None for TFRecords.
    counts: the records of each file, in the order of the sorted paths of a
      pattern, or of `paths` as they are given. Without it the frames of the
      records are walked, 2 us each; required with `read_fn`.

  Raises:
    DataError: there is no such file, or one is truncated.
    UnsupportedOptionError: `read_fn` without `counts`, or other than one count
      a file.
  """
  if isinstance(paths, str | os.PathLike):
    where = os.fspath(paths)
    if manifest_lib.is_extracted(where):
      return from_shards(tfrecord.find_shards(where, split))
    found = tuple(sorted(tf.io.gfile.glob(where)))
    selection = (os.path.abspath(where),)
    if not found or any(map(os.path.isdir, found)):
      raise errors.DataError(
        f'{where}: {"a directory" if found else "no such file"}; expected '
        "files, a pattern such as 'logs/*.tfrecord', or a directory that "
        '`python -m examples.datasets.extract` has filled'
      )
  else:
    found = tuple(map(os.fspath, paths))
    selection = tuple(sorted(map(os.path.abspath, found)))
    missing = [path for path in found if not tf.io.gfile.exists(path)]
    if missing or not found:
      raise errors.DataError(
        f'{missing[0] if missing else "an empty list of paths"}: no such '
        'file; expected a list of files'
      )
  if counts is None and read_fn is not None:
    raise errors.UnsupportedOptionError(
      'read_fn without counts',
      'the number of records of each file beside a reader of your own',
      'pass counts=[...]: lengths of epochs and shares follow from it',
    )
  if counts is not None and len(counts) != len(found):
    raise errors.UnsupportedOptionError(
      f'{len(counts)} counts for {len(found)} files',
      'one count a file',
      'pass counts in the order of the sorted paths',
    )
  if counts is None:
    counts = [tfrecord.count_records(path, check=None) for path in found]
  return Files(
    name='files',
    paths=found,
    counts=tuple(map(int, counts)),
    identity=tuple(map(_status, found)),
    read_fn=read_fn,
    selection=selection,
  )


def find_images(directory: str | os.PathLike[str], split: str) -> Files:
  """Finds the shards of a split of images, and counts their records.

  Args:
    directory: as `write_tfrecords` or `extract` leaves it.
    split: 'train' or 'test'.

  Raises:
    DataError: as `tfrecord.find_shards` and `from_shards`; or a manifest tells
      of shards of which the first record is no 28x28 image.
    UnsupportedOptionError: another `split`.
  """
  shards = tfrecord.find_shards(directory, split)
  if shards.extracted is not None:
    # One record tells what was extracted; shards without a manifest are
    # looked at one by one as they are counted.
    tfrecord.count_records(shards.paths[0], limit=1)
  return from_shards(shards)


def from_shards(shards: tfrecord.Shards) -> Files:
  """The shards of a split, as `write_tfrecords` or `extract` left them.

  What a manifest tells of is not looked at.

  Raises:
    DataError: a shard without a manifest is truncated or empty, or its first
      record is no 28x28 image.
  """
  if shards.extracted is not None:
    counts = [shard.examples for shard in shards.extracted]
    identity = [(s.size, s.sha256) for s in shards.extracted]
  else:
    counts = [tfrecord.count_shard(path) for path in shards.paths]
    identity = list(map(_status, shards.paths))
  return Files(
    name=f'{shards.name}-{shards.split}',
    paths=shards.paths,
    counts=tuple(counts),
    is_dealt=shards.extracted is None,
    identity=tuple(identity),
  )


def read_epochs(
  files: Files, plan: plan_lib.Plan, is_cached: bool
) -> tf.data.Dataset:
  """The records in the order that training or evaluation wants.

  Args:
    files: those of this pipeline.
    plan: of the pipeline.
    is_cached: whether a cache follows, which keeps the first order.
  """
  n = files.num_records
  paths = tf.data.Dataset.from_tensor_slices(list(files.paths))
  if plan.is_shuffled and not is_cached and plan.buffer_for(n) < n:
    # A buffer that is smaller than the split mixes only neighbours, so the
    # files take turns in being neighbours.
    paths = shuffle.shuffle(paths, len(files.paths), plan.options.seed)
  return _interleave(paths, files, plan, in_order=not plan.training)


def read_pass(
  files: Files, plan: plan_lib.Plan, number: int | tf.Tensor
) -> tf.data.Dataset:
  """The records of one pass, in file order by (seed, number)."""
  paths = tf.data.Dataset.from_tensor_slices(list(files.paths))
  n = files.num_records
  if plan.is_shuffled and plan.buffer_for(n) < n:
    paths = shuffle.shuffle_pass(
      paths, len(files.paths), plan.options.seed, number
    )
  return _interleave(paths, files, plan, in_order=not plan.training)


def read(
  paths: Sequence[str],
  files: Files,
  cycle: int,
  in_order: bool,
  num_parallel_calls: int = tf.data.AUTOTUNE,
  deterministic: bool = True,
) -> tf.data.Dataset:
  """Interleaves the records of some of the files; `cycle` are open at once."""
  return _read(
    tf.data.Dataset.from_tensor_slices(list(paths)),
    files,
    cycle,
    in_order,
    num_parallel_calls,
    deterministic,
  )


def _interleave(paths, files, plan, in_order):
  cycle = min(len(files.paths), MAX_OPEN_FILES)
  if in_order and files.is_dealt:
    # One of each file in turn undoes the dealing, if all of them are open.
    cycle = len(files.paths)
  records = _read(
    paths,
    files,
    cycle,
    in_order,
    plan.options.num_parallel_calls,
    plan.reads_in_order,
  )
  if plan.options.service is not None:
    return records  # Each of its workers sees some of them only.
  return records.apply(
    tf.data.experimental.assert_cardinality(files.num_records)
  )


def _read(paths, files, cycle, in_order, calls, deterministic):
  if not in_order:
    block = _BLOCK_LENGTH
  elif files.is_dealt:
    block = 1
  else:
    # A file at a time; those that follow are opened ahead.
    block = max(1, *files.counts)
  return paths.interleave(
    files.read_fn or tf.data.TFRecordDataset,
    cycle_length=cycle,
    block_length=block,
    # tf.data refuses more calls than there are files open at once.
    num_parallel_calls=calls if calls < 0 else min(calls, cycle),
    deterministic=deterministic,
  )


def _status(path: str) -> tuple[int, int]:
  if '://' not in path:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
  remote = tf.io.gfile.stat(path)  # Knows whole seconds only.
  return remote.length, remote.mtime_nsec
