"""Defines a site: a place where a program is built, and its conversions of kinds."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.spmd import pieces
from tf_strategies.spmd.kinds import (
  AS_IS,
  BATCH,
  HELD,
  SUM,
  WHOLE,
  Dim,
  Listed,
  Part,
  Shard,
  Split,
  SplitIfLong,
  Value,
)
from tf_strategies.spmd.program import Node, Tensor


@dataclasses.dataclass(frozen=True)
class ReplicaRows:
  """Which rows of the batch a replica has; all but flags are int32 scalars.

  Attributes:
    count: number of rows that it computes. An empty replica computes one padding
      row, since kernels of TensorFlow fail without rows.
    start: index of the first of them.
    total: number of rows of the whole batch.
    real: number of rows without padding; None if there is never any padding.
    is_first: whether it is the first replica that has rows.
    place: its number among all replicas, if replicas have shards.
  """

  count: tf.Tensor
  start: tf.Tensor
  total: tf.Tensor
  real: tf.Tensor | None = None
  is_first: bool | tf.Tensor = False
  place: int | tf.Tensor | None = None


def rows_or_stand_in(
  real: tf.Tensor, start: tf.Tensor, total: tf.Tensor
) -> ReplicaRows:
  """Returns the rows of a replica that may be empty. It then gets a padding row."""
  is_first = tf.logical_and(real > 0, tf.equal(start, 0))
  start = tf.maximum(tf.minimum(start, total - 1), 0)
  return ReplicaRows(tf.maximum(real, 1), start, total, real, is_first)


# Elements: from here on a branch costs less than a copy.
_LARGE = 4096


@dataclasses.dataclass(eq=False)
class Site:
  """A place where operations are built: a replica, or the home of central variables.

  Attributes:
    device: name of the device; None in a function that runs on any device.
    rows: the rows of the batch that it computes.
    replica: number of the replica in this process; None if it is not a replica.
    is_chief: whether it runs the operations that run once in all processes.
    is_home: whether it writes the variables that have one copy in this process.
    tensors: the built tensors, by (tensor of the program, kind), or by the key of
      `_once`. In a branch or loop, those that were built outside of it come last.
    copies: in a branch or loop, handles of copies of variables that others write.
  """

  device: str | None
  rows: ReplicaRows
  replica: int | None = None
  is_chief: bool = False
  is_home: bool = False
  tensors: ChainMap = dataclasses.field(default_factory=ChainMap)
  copies: dict[Any, tf.Tensor] = dataclasses.field(default_factory=dict)

  def inner(self) -> Site:
    """Returns this site inside of a branch or loop."""
    return dataclasses.replace(self, tensors=self.tensors.new_child())

  def in_function(self, rows: Mapping[str, tf.Tensor]) -> Site:
    """Returns this site inside of a function, which gets what differs between sites.

    Args:
      rows: tensors in place of attributes of `ReplicaRows`.
    """
    rows = dataclasses.replace(self.rows, **rows)
    return Site(None, rows, self.replica, self.is_chief, self.is_home)

  def with_copies(self, copies: Mapping[Any, tf.Tensor]) -> Site:
    """Returns this site with the handles of copies of some variables."""
    return dataclasses.replace(self, copies={**self.copies, **copies})

  def get(self, tensor: Tensor, kind=AS_IS) -> tf.Tensor:
    """Returns a tensor that was built, in the given kind."""
    return self.tensors[tensor, kind]

  # Lengths.

  def lengths(
    self,
    dims: Sequence[Dim],
    dtype: tf.DType,
    rank: int,
    own: int | None = None,
  ) -> tf.Tensor:
    """Returns lengths that follow from the number of rows, as a tensor of `dtype`.

    The length at index `own` counts this replica's rows, all others the whole
    batch's. With rank 0 there is one length.
    """

    def build():
      count = tf.cast(self.rows.count, dtype)
      total = tf.cast(self.rows.total, dtype)
      numbers = [
        self._length(dim, count if i == own else total)
        for i, dim in enumerate(dims)
      ]
      return tf.convert_to_tensor(numbers[0] if rank == 0 else numbers, dtype)

    return self._once((tuple(dims), own, dtype, rank), 'CPU:0', build)

  def _once(self, key, device, build):
    """Returns what `build()` made when it was first asked for `key`."""
    if key not in self.tensors:
      # It is used anywhere, so it waits for nothing.
      with tf.device(device), tf.control_dependencies(None):
        self.tensors[key] = build()
    return self.tensors[key]

  def _length(self, dim, rows):
    """Returns the value of a length, with `rows` as the number of rows."""
    if dim.is_number:
      return dim.number
    for _ in range(dim.symbols.count(BATCH) - 1):
      rows *= tf.cast(self.rows.total, rows.dtype)
    return rows if dim.number == 1 else rows * dim.number

  def whole_length(self, own: tf.Tensor) -> tf.Tensor:
    """Returns the whole batch's length for the length `own` of this replica's rows."""
    count = tf.cast(self.rows.count, own.dtype)
    return own // count * tf.cast(self.rows.total, own.dtype)

  def whole_shape(self, own: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the whole batch's shape for this replica's, with rows along `axis`."""
    return _with_length(own, axis, self.whole_length(own[axis]))

  def own_shape(
    self, shape: tf.Tensor, axis: int, lengths: Sequence[Dim] | None
  ) -> tf.Tensor:
    """Returns this replica's shape for the whole's: `axis` counts its own rows.

    `lengths` are those in `shape` if they follow from the number of rows.
    """
    if lengths is not None:
      return self.lengths(lengths, shape.dtype, 1, axis)
    with tf.device('CPU:0'):
      own = _share(shape[axis], self.rows.count, self.rows.total)
      return _with_length(shape, axis, own)

  def op(self, node: Node, inputs) -> list[tf.Tensor]:
    """Copies an operation, with other inputs."""
    # Extracting a stack takes as long as the rest of a copy.
    stack = self._once('stack', self.device, _tf_internal.extract_stack)
    return _tf_internal.copy_op(node.op, inputs, node.attrs, node.opaque, stack)

  # Other kinds of a tensor.

  def as_kind(self, tensor: Tensor, held, seen, wanted) -> tf.Tensor:
    """Returns a tensor in the wanted kind, without an exchange.

    `held` is the kind in which it was computed. `seen` is the kind after a meeting:
    whole if replicas have met for it, otherwise `held`.
    """
    if (tensor, wanted) in self.tensors:
      return self.get(tensor, wanted)
    if wanted == held == seen or isinstance(held, Listed):
      return self.get(tensor)
    if (seen, wanted) == (SUM, HELD):
      [self.tensors[tensor, wanted]] = self.contributions([self.get(tensor)])
      return self.get(tensor, wanted)
    whole = self.get(tensor, AS_IS if held == WHOLE else WHOLE)
    if isinstance(wanted, Part):
      converted = self.part_of(whole, wanted)
    elif isinstance(wanted, Shard):
      converted = pieces.cut(whole, wanted, self.rows.place)
    else:
      converted = self.rows_of(whole, wanted)
    self.tensors[tensor, wanted] = converted
    return converted

  def part_of(self, whole, part):
    """Returns this replica's term of a sum over replicas that equals `whole`."""
    is_first = self.rows.is_first
    if part.op != 'sum' or is_first is True:
      return whole
    if is_first is False:
      return tf.zeros_like(whole)
    return tf.where(is_first, whole, tf.zeros_like(whole))

  def rows_of(self, whole, wanted):
    """Returns this replica's rows of a whole tensor, along the wanted axis."""
    axis = wanted.axis
    with tf.device('CPU:0'):
      length = tf.shape(whole)[axis]
      begin = _share(length, self.rows.start, self.rows.total)
      size = _share(length, self.rows.count, self.rows.total)
      if isinstance(wanted, SplitIfLong):
        is_one = tf.equal(length, 1)
        begin = tf.where(is_one, 0, begin)
        size = tf.where(is_one, 1, size)
    return _cut(whole, axis, begin, size)

  # A replica without rows computes with a padding row, which must not count.

  def if_real(self, build, otherwise):
    """Returns `build()` if this replica has rows, otherwise `otherwise()`."""
    if self.rows.real is None:
      return build()
    return tf.cond(self.rows.real > 0, build, otherwise)

  def contributions(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns terms of sums, which are zero if this replica has no rows."""
    if self.rows.real is None:
      return list(tensors)
    results, large = list(tensors), []
    with tf.device(self.device):
      is_real = self._once('is_real', self.device, lambda: self.rows.real > 0)
      for i, tensor in enumerate(tensors):
        if (tensor.shape.num_elements() or _LARGE) < _LARGE:
          zero = self._once(
            tensor.dtype, self.device, lambda t=tensor: tf.zeros([], t.dtype)
          )
          results[i] = tf.where(is_real, tensor, zero)
        else:
          large.append(i)
      if large:
        found = self.if_real(
          lambda: [tf.identity(tensors[i]) for i in large],
          lambda: [tf.zeros_like(tensors[i]) for i in large],
        )
        for i, result in zip(large, found, strict=True):
          result.set_shape(tensors[i].shape)
          results[i] = result
    return results

  def real_rows(self, tensor: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Returns a tensor, of length zero along `axis` if this replica has no rows."""
    if self.rows.real is None:
      return tensor
    with tf.device('CPU:0'):
      length = tf.where(self.rows.real > 0, tf.shape(tensor)[axis], 0)
    with tf.device(self.device):
      return _cut(tensor, axis, 0, length)


def at_each(sites: Sequence[Site], make: Callable, *columns: Sequence) -> list:
  """Returns `make(site, ...)` of each site, on its device, and of its values in columns."""
  results = []
  for site, *values in zip(sites, *columns, strict=True):
    with tf.device(site.device):
      results.append(make(site, *values))
  return results


def _with_length(shape, axis, length) -> tf.Tensor:
  """Returns a shape with another length of an axis."""
  return tf.concat([shape[:axis], length[None], shape[axis + 1 :]], 0)


def _cut(tensor, axis, begin, size) -> tf.Tensor:
  """Returns some of a tensor along an axis."""
  shape = tensor.shape
  with tf.device('CPU:0'):
    # It is unknown for the outputs of tables and of Python code.
    rank = tf.rank(tensor) if shape.rank is None else shape.rank
    axis %= rank
    begins = tf.one_hot(axis, rank, begin, 0, dtype=tf.int32)
    sizes = tf.one_hot(axis, rank, size, -1, dtype=tf.int32)
  result = tf.slice(tensor, begins, sizes)
  if shape.rank is not None:
    result.set_shape([None if i == axis else n for i, n in enumerate(shape)])
  return result


def _share(length, rows, total):
  """Returns the part of `length`, a multiple of `total`, that belongs to `rows`."""
  total = tf.cast(tf.maximum(total, 1), length.dtype)
  return length // total * tf.cast(rows, length.dtype)


def set_own_shape(built: tf.Tensor, tensor: Tensor, value: Value) -> None:
  """Sets the static shape of a replica's part of a tensor."""
  if built.dtype in (tf.variant, tf.resource):
    return
  shape = tensor.shape.merge_with(value.static_shape)
  if isinstance(value.kind, Shard):
    own = [value.kind.length(shape.num_elements())]
  elif shape.rank is not None:
    own = shape.as_list()
  elif value.dims is not None:
    own = [d.number if d.is_number else None for d in value.dims]
  else:
    return
  if isinstance(value.kind, Split):
    own[value.kind.axis] = None
  built.set_shape(own)
