"""What gradients can travel as: codecs, and what is less than a sum of arrays.

A codec works on any stretch of an array (`codec.py`). Two ways do not: a sum of
matrices of low rank, and the largest values alone. One table has them all.

Example:

  >>> compression = parse('powersgd(4)')
  >>> compression.name, compression.rank, compression.keeps_rest
  ('powersgd', 4, True)
  >>> compression.bytes_sent((1000, 500), world_size=2)
  24000
  >>> parse('int8').bytes_sent((1000, 500), world_size=2)
  507816
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

from tf_strategies import errors, option_checks
from tf_strategies.collectives import codecs
from tf_strategies.collectives import schedule as schedule_lib

POWER_SGD, TOP_K = 'powersgd', 'topk'
_EXAMPLES = {POWER_SGD: 'powersgd(4)', TOP_K: 'topk(0.01)'}
_FORM = re.compile(r'(\w+)(?:\(([^()]*)\))?')
# Matrices that become less than twice smaller travel whole.
_LEAST_GAIN = 2


@dataclasses.dataclass(frozen=True)
class Compression:
  """One way, as `parse` returns it.

  Attributes:
    name: without the argument.
    rank: of `powersgd`.
    fraction: of `topk`.
  """

  name: str
  rank: int = 0
  fraction: float = 1.0

  @property
  def codec(self) -> str:
    """What arrays travel as in the sums that it makes."""
    return self.name if self.name in codecs.CODECS else codecs.NONE.name

  @property
  def keeps_rest(self) -> bool:
    """Whether what was not sent is added to the next gradient."""
    return self.name not in codecs.CODECS or codecs.get(self.name).keeps_rest

  def applies(self, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a shape is sent so, not whole."""
    if self.name != POWER_SGD:
      return self.name != codecs.NONE.name
    rows, columns = matrix_shape(shape)
    factors = self.rank * (rows + columns)
    return len(shape) > 1 and _LEAST_GAIN * factors <= rows * columns

  def count(self, length: int) -> int:
    """How many values `topk` sends of so many."""
    return min(length, max(1, math.ceil(self.fraction * length)))

  def bytes_sent(self, shape: tuple[int, ...], world_size: int) -> int:
    """Bytes that a rank sends for a float32 tensor that travels alone.

    Of ranks that differ by a few bytes, the first one. What is so small that it
    goes straight to all is N / 2 times as much, with N ranks.
    """
    length, others = math.prod(shape), world_size - 1
    if self.name == TOP_K:
      return others * 8 * self.count(length)
    if self.name == POWER_SGD and self.applies(shape):
      factors = (self.rank * n for n in matrix_shape(shape))
      return sum(_all_reduce_bytes('none', n, world_size) for n in factors)
    return _all_reduce_bytes(self.codec, length, world_size)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
  """The matrix that a kernel is: what leads to each output, and the outputs."""
  return math.prod(shape[:-1]), shape[-1] if shape else 1


@functools.cache
def _parsed(text: str) -> Compression | None:
  found = _FORM.fullmatch(text)
  name, argument = found.groups() if found else ('', None)
  if argument is None:
    return Compression(name) if name in codecs.CODECS else None
  try:
    if name == POWER_SGD and int(argument) > 0:
      return Compression(name, rank=int(argument))
    if name == TOP_K and 0 < float(argument) <= 1:
      return Compression(name, fraction=float(argument))
  except ValueError:
    return None
  return None


def parse(text: object) -> Compression:
  """What a name such as 'int8', 'powersgd(4)' or 'topk(0.01)' stands for.

  Raises:
    UnsupportedOptionError: it stands for nothing.
  """
  parsed = _parsed(text) if isinstance(text, str) else None
  if parsed is None:
    name = text.partition('(')[0].strip() if isinstance(text, str) else ''
    known = [*codecs.CODECS, *_EXAMPLES]
    meant = option_checks.nearest(name, known) or codecs.NONE.name
    names = [*codecs.CODECS, 'powersgd(RANK)', 'topk(FRACTION)']
    raise errors.UnsupportedOptionError(
      f'compression={text!r}',
      f'one of {", ".join(map(repr, names))}, with an integer RANK of at least 1 '
      'and a FRACTION above 0 and of at most 1',
      f'write compression={_EXAMPLES.get(meant, meant)!r}',
    )
  return parsed


def _all_reduce_bytes(codec: str, length: int, world_size: int) -> int:
  """What rank 0 sends in an all-reduce in which each rank owns a chunk."""
  sizes = schedule_lib.chunk_sizes(length, world_size)
  each = [codecs.wire_bytes(codec, np.dtype('f4'), n) for n in sizes]
  return sum(each[1:]) + (world_size - 1) * each[0]
