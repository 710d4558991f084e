"""Sources of examples: files, read in parallel in a fixed order, and arrays."""

import dataclasses
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import errors, option_checks

ReadFn = Callable[[tf.Tensor], tf.data.Dataset]
ParseFn = Callable[[Any], Any]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# A TFRecord: uint64 length, its masked CRC, the payload, the payload's CRC.
_HEADER = struct.Struct('<QI')
_FOOTER_BYTES = 4


@option_checks.has_options
class Files:
  """Records in files of any format.

  The files are looked up once, when the source is made. Evaluation reads one after
  the other, and training several at once.

  Args:
    paths: a list of files, or a pattern such as 'gs://bucket/logs-*.csv'.
    read_fn: called with the path of a file, returns a dataset of its records.
    parse_fn: called with a batch of records, returns a structure of tensors
      with one row for each record; deterministic.
    counts: the number of records of each file, in the order of the sorted
      paths of a pattern, or of `paths` as given. The lengths of epochs and
      shares follow from it.
    decode_fn: called with the components of each batch after the cache.

  Raises:
    DataError: a file is missing.
    UnsupportedOptionError: not one count for each file, or an argument of a
      wrong type.
  """

  def __init__(
    self,
    paths: Paths,
    read_fn: ReadFn,
    parse_fn: ParseFn,
    counts: Sequence[int],
    *,
    decode_fn: Callable[..., Any] | None = None,
  ):
    option_checks.check_function('read_fn', read_fn)
    option_checks.check_function('parse_fn', parse_fn)
    option_checks.check_function('decode_fn', decode_fn, or_none=True)
    self.paths = _find(paths)
    is_list = isinstance(counts, Sequence | np.ndarray)
    option_checks.check(
      is_list and not isinstance(counts, str | bytes),
      f'counts={counts!r}',
      'a list with one value for each file',
      'write counts=[...]',
    )
    option_checks.check(
      len(counts) == len(self.paths),
      f'{len(counts)} counts for {len(self.paths)} files',
      'one count for each file',
      'pass counts in the order of the sorted paths',
    )
    for count in counts:
      option_checks.check_int('a count', count, 0, fix='count the records')
    self.counts = tuple(map(int, counts))
    self.read_fn = read_fn
    self.parse_fn = parse_fn
    self.decode_fn = decode_fn

  @property
  def num_examples(self) -> int:
    """Returns the number of records of all files."""
    return sum(self.counts)

  def __len__(self) -> int:
    return self.num_examples


@option_checks.has_options
class TFRecords(Files):
  """Records in TFRecord files.

  Example:

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   for i in range(3):
    ...     path = os.path.join(directory, f'{i}.tfrecord')
    ...     with tf.io.TFRecordWriter(path) as writer:
    ...       writer.write(b'%d' % i)
    ...   TFRecords(f'{directory}/*.tfrecord', tf.strings.length).counts
    (1, 1, 1)

  Args:
    paths: as in `Files`.
    schema: a dict of `tf.io.FixedLenFeature` and its like for
      `tf.io.parse_example`, or a `parse_fn` as in `Files`.
    counts: as in `Files`. Without it, the records are counted when the source
      is made, at 2 us for each. This is slow on remote storage.
    decode_fn: as in `Files`.

  Raises:
    DataError: a file is missing or truncated.
    UnsupportedOptionError: not one count for each file.
  """

  def __init__(
    self,
    paths: Paths,
    schema: Mapping[str, Any] | ParseFn,
    counts: Sequence[int] | None = None,
    *,
    decode_fn: Callable[..., Any] | None = None,
  ):
    parse_fn = schema
    option_checks.check(
      isinstance(schema, Mapping) or callable(schema),
      f'schema={schema!r}',
      'a dict of features, or a function of a batch of records',
      "write for instance {'label': tf.io.FixedLenFeature([], tf.int64)}",
    )
    if isinstance(schema, Mapping):
      parse_fn = lambda records: tf.io.parse_example(records, schema)  # noqa: E731
    # Looked up when it is called: slow storage may be simulated.
    read_fn = lambda path: tf.data.TFRecordDataset(path)  # noqa: E731
    if counts is None:
      paths = _find(paths)
      counts = [count_records(path) for path in paths]
    super().__init__(paths, read_fn, parse_fn, counts, decode_fn=decode_fn)


def count_records(path: str) -> int:
  """Counts the records of a TFRecord file, and checks its framing.

  Only the 12 bytes before each record are looked at: O(records) time. TensorFlow
  verifies the checksums when it reads. The framing is that of
  tensorflow/core/lib/io/record_writer.h.

  Args:
    path: the file, on this machine or on storage that TensorFlow can read.

  Raises:
    DataError: the file ends inside a record or cannot be read.
  """
  count = position = 0
  try:
    # Python's own files seek five times as fast.
    is_remote = option_checks.is_remote(path)
    with tf.io.gfile.GFile(path, 'rb') if is_remote else open(path, 'rb') as f:
      size = tf.io.gfile.stat(path).length
      while position < size:
        header = f.read(_HEADER.size)
        length = _HEADER.unpack(header)[0] if len(header) == 12 else size
        end = position + _HEADER.size + length + _FOOTER_BYTES
        if end > size:
          raise OSError(
            f'it is truncated or corrupt in record {count} at byte {position}'
          )
        f.seek(end)
        position = end
        count += 1
  except (OSError, tf.errors.OpError) as e:
    raise errors.DataError(
      f'{path}: Expected a complete TFRecord file, got one that cannot be read: '
      f'{e}. Fix: check the path and its permissions, or write the file again.'
    ) from e
  return count


def _find(paths: Paths) -> tuple[str, ...]:
  """Returns the files that a pattern or a list names."""
  kinds = str | os.PathLike
  is_pattern = isinstance(paths, kinds) or not isinstance(paths, Iterable)
  given = (paths,) if is_pattern else tuple(paths)
  option_checks.check(
    all(isinstance(path, kinds) for path in given),
    f'paths={paths!r}',
    'a pattern, or a list of paths',
    "write for instance paths='logs/*.tfrecord'",
  )
  found = list(map(os.fspath, given))
  try:
    if is_pattern:
      found = sorted(tf.io.gfile.glob(found[0]))
    has_directory = any(tf.io.gfile.stat(path).is_directory for path in found)
  except tf.errors.OpError as e:
    raise errors.DataError(
      f'paths={paths!r}: Expected files that can be read, got {e.message}. Fix: '
      'check the path, and that this process can read there.'
    ) from e
  if has_directory or not found:
    raise errors.DataError(
      f'paths={paths!r}: Expected files, got '
      f'{"a directory" if has_directory else "none"}. Fix: pass a list of files or '
      "a pattern, such as 'logs/*.tfrecord'"
    )
  return tuple(found)


@option_checks.has_options
@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
  """Examples in memory, one row each.

  The components are read-only views of the passed arrays, without a copy, because
  pipelines and TensorFlow may share their memory.

  Example:

    >>> Arrays((np.zeros([3, 4]), np.array([0, 1, 1]))).num_examples
    3

  Attributes:
    components: an array, or a tuple or dict of arrays of equal length.
    decode_fn: called with the components of each batch after the cache, such
      as a cast from uint8 to float32; returns the batch.

  Raises:
    DataError: if there is no array or no row, or lengths differ.
    UnsupportedOptionError: if `decode_fn` is not a function.
  """

  components: Any
  decode_fn: Callable[..., Any] | None = None

  def __post_init__(self):
    components = self.components
    option_checks.check_function('decode_fn', self.decode_fn, or_none=True)
    if isinstance(components, list):  # To tf.data a list is one tensor.
      components = tuple(components)
    components = tf.nest.map_structure(_read_only, components)
    lengths = [
      len(array) if array.ndim else None
      for array in tf.nest.flatten(components)
    ]
    if not lengths or len(set(lengths)) != 1 or not lengths[0]:
      raise errors.DataError(
        f'Expected arrays with one row for each example, got lengths {lengths} '
        f'of {self.components!r:.80}. Fix: pass arrays of equal length, with at least one row.'
      )
    object.__setattr__(self, 'components', components)

  @property
  def num_examples(self) -> int:
    """The number of rows."""
    return len(tf.nest.flatten(self.components)[0])

  def __len__(self) -> int:
    return self.num_examples


def _read_only(value: Any) -> np.ndarray:
  view = np.asarray(value).view()
  view.flags.writeable = False
  return view
