"""What a replica holds of a tensor of one device's program."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

# The largest int32.
_MOST = 2**31 - 1
# The symbol of the number of rows of the whole batch.
BATCH = 'batch'


# All of it, the same bits on every replica.
WHOLE = 'whole'
# What a consumer wants that takes whatever the replica holds.
AS_IS = 'as is'


@dataclasses.dataclass(frozen=True)
class Split:
  """Its consecutive rows of the batch, which lies along `axis`."""

  axis: int


@dataclasses.dataclass(frozen=True)
class Part:
  """A tensor of which all replicas' `op` is the value: 'sum', 'max', ...

  Of a replica without rows it counts only if it `is_held`: part of a variable's value.
  """

  op: str
  is_held: bool = False


@dataclasses.dataclass(frozen=True)
class Shard:
  """Its consecutive elements of the flat tensor, one of `count` equal pieces.

  The last pieces are filled up, with elements that mean nothing.
  """

  count: int

  def length(self, elements: int) -> int:
    """The elements of a piece of a tensor of so many."""
    return -(-elements // self.count)


@dataclasses.dataclass(frozen=True)
class Listed:
  """A list of tensors of one kind; None while it has no element."""

  kind: Any = None


SUM = Part('sum')
HELD = Part('sum', is_held=True)
# What one replica alone has: it did something that is done once.
FIRST = Part('first')


@dataclasses.dataclass(frozen=True)
class SplitIfLong:
  """Split along `axis`, unless its length there is 1 (known when it runs)."""

  axis: int


@dataclasses.dataclass(frozen=True)
class Dim:
  """A length: `number` times the lengths that `symbols` stand for."""

  number: int = 1
  symbols: tuple[str, ...] = ()

  @property
  def is_number(self) -> bool:
    """Returns whether it is known when the program is built."""
    return not self.symbols

  @property
  def has_batch(self) -> bool:
    """Returns whether it is a multiple of the number of rows."""
    return BATCH in self.symbols

  @property
  def is_of_rows(self) -> bool:
    """Returns whether it follows from the number of rows."""
    return all(symbol == BATCH for symbol in self.symbols)

  def times(self, other: Dim) -> Dim:
    """The product."""
    symbols = tuple(sorted(self.symbols + other.symbols))
    return Dim(self.number * other.number, symbols)

  def over(self, other: Dim) -> Dim | None:
    """The quotient, if `other` divides this length whatever the symbols are."""
    mine = collections.Counter(self.symbols)
    theirs = collections.Counter(other.symbols)
    if other.number == 0 or self.number % other.number or theirs - mine:
      return None
    rest = tuple(sorted((mine - theirs).elements()))
    return Dim(self.number // other.number, rest)


def symbol(what: str, of: Any, position: int) -> Dim:
  """A length that is known when it runs."""
  return Dim(1, (f'{what}:{id(of)}:{position}',))


def ints_of(numbers, of: Any) -> tuple[Dim, ...]:
  """Returns the contents of the tensor `of`; None among `numbers` is unknown."""
  found = []
  for i, number in enumerate(numbers):
    dim = number if isinstance(number, Dim | None) else Dim(int(number))
    # TensorFlow wraps around what the dtype does not hold.
    is_held = (
      dim is not None
      and of.dtype.min <= dim.number <= of.dtype.max
      and (dim.is_number or of.dtype.size >= 4)
    )
    found.append(dim if is_held else symbol('value', of, i))
  return tuple(found)


ONE = Dim(1)
ROWS = Dim(1, (BATCH,))


def product(dims) -> Dim:
  """The product of lengths."""
  result = ONE
  for dim in dims:
    result = result.times(dim)
  return result


def as_numbers(dims: Sequence[Dim] | None) -> tuple[int, ...] | None:
  """Returns lengths as numbers, if all of them are numbers."""
  if dims is None or not all(dim.is_number for dim in dims):
    return None
  return tuple(dim.number for dim in dims)


@dataclasses.dataclass(frozen=True)
class Value:
  """Everything that is known about a tensor before the program runs.

  `dims` are the lengths of the whole tensor, None for an unknown rank. `ints` are
  the contents of a small tensor of integers, as lengths.
  `resource` is the variable, or other object, that a handle stands for. It has
  `is_part` (replicas hold parts of a sum), `shard` (each replica holds one),
  `is_single` (there is one copy), and `variable`. `axes` of a tensor of axes says
  for each axis whether the tensor contains it; None if that is unknown.
  """

  kind: Any
  dims: tuple[Dim, ...] | None = None
  ints: tuple[Dim, ...] | None = None
  resource: Any = None
  axes: tuple[bool | None, ...] | None = None

  @property
  def rank(self) -> int | None:
    """Number of axes, None if unknown."""
    return None if self.dims is None else len(self.dims)

  @functools.cached_property
  def static_shape(self) -> tuple[int, ...] | None:
    """The lengths, if all of them are numbers."""
    return as_numbers(self.dims)

  @functools.cached_property
  def numbers(self) -> tuple[int, ...] | None:
    """The contents, if all of them are numbers."""
    return as_numbers(self.ints)

  @functools.cached_property
  def lengths(self) -> tuple[Dim, ...] | None:
    """The contents, if all of them follow from the number of rows."""
    if self.ints is None or self.kind != WHOLE:
      return None
    # A larger number is no length, and more than what lengths are made of holds.
    are_known = all(i.is_of_rows and abs(i.number) <= _MOST for i in self.ints)
    return self.ints if are_known else None

  def of(self, kind) -> Value:
    """The same tensor held in another way."""
    return dataclasses.replace(self, kind=kind)

  def like(self, dims: Sequence[Dim]) -> Value:
    """A tensor of other lengths that is held alike, with as many rows."""
    if not isinstance(self.kind, Split):
      return Value(self.kind, dims)
    return split(self.kind.axis, self.dims[self.kind.axis], dims)


def one_list(lists: Sequence[Value]) -> Value | None:
  """Returns a list that may be any of these; None if their elements differ."""
  known = [v for v in lists if v.kind.kind is not None] or lists
  if any(v.kind != known[0].kind for v in known):
    return None
  are_same = all(v.ints == known[0].ints for v in known)
  return known[0] if are_same else dataclasses.replace(known[0], ints=None)


def split(axis: int, length: Dim, dims: Sequence[Dim]) -> Value:
  """A tensor that is split along `axis`, whose length is `length` there."""
  return Value(Split(axis), (*dims[:axis], length, *dims[axis + 1 :]))
