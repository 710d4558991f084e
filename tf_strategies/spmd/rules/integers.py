"""Contents of small tensors of integers, such as shapes and axes.

They are NumPy arrays of `Dim`, in which the number of rows is a symbol. None is an
element that is unknown.
"""

from __future__ import annotations

import operator

import numpy as np

from tf_strategies.spmd import kinds
from tf_strategies.spmd.kinds import Dim
from tf_strategies.spmd.plan import FOLDS, MOST_INTS, UnknownError, known
from tf_strategies.spmd.rules.shapes import const_ints, index_of


def _numbers(*lengths) -> tuple[int, ...]:
  """Returns lengths as numbers.

  Raises:
    UnknownError: one is none.
  """
  return known(kinds.as_numbers(lengths))


_ARITHMETIC = {
  'Add': operator.add,
  'AddV2': operator.add,
  'FloorDiv': operator.floordiv,
  'FloorMod': operator.mod,
  'Maximum': max,
  'Minimum': min,
  'Mul': operator.mul,
  'Sub': operator.sub,
}


def _compute(context, *arrays):
  kind = context.node.type

  def of_two(one, other):
    if one.is_number and other.is_number:
      is_division = kind in ('FloorDiv', 'FloorMod')
      if is_division and other.number == 0:
        return None
      return Dim(_ARITHMETIC[kind](one.number, other.number))
    if kind == 'Mul':
      return one.times(other)
    return one.over(other) if kind == 'FloorDiv' else None

  return [np.frompyfunc(of_two, 2, 1)(*arrays)]


def _concat_offset(context, axis, *shapes):
  [axis] = _numbers(axis)
  start, found = Dim(0), []
  for shape in shapes:
    offset = np.full(len(shape), Dim(0))
    offset[axis] = start
    found.append(offset)
    both = start and start.is_number and shape[axis].is_number
    start = Dim(start.number + shape[axis].number) if both else None
  return found


def _stitch(context, *arrays):
  half = len(arrays) // 2
  found = {}
  for index, part in zip(arrays[:half], arrays[half:], strict=True):
    numbers = _numbers(*np.ravel(index))
    found.update(zip(numbers, np.ravel(part), strict=True))
  return [[found.get(i) for i in range(max(found, default=-1) + 1)]]


def _fill(context, shape, value):
  numbers = _numbers(*shape)
  if np.prod(numbers) > MOST_INTS:
    raise UnknownError
  return [np.full(numbers, value)]


def _range(context, *bounds):
  numbers = range(*_numbers(*bounds))
  if len(numbers) > MOST_INTS:
    raise UnknownError
  return [numbers]


def _strided_slice(context, array, *bounds):
  index = tuple(index_of(context))
  for entry in index:
    is_slice = isinstance(entry, slice)
    parts = (entry.start, entry.stop, entry.step) if is_slice else (entry,)
    if any(isinstance(part, Dim) for part in parts):
      raise UnknownError
  return [np.asarray(array, object)[index]]


def _slice(context, array, begin, size):
  first, count = _numbers(*begin, *size)
  return [array[first:] if count == -1 else array[first : first + count]]


def _gather(context, array, indices, *axis):
  numbers = np.array(_numbers(*np.ravel(indices)), int)
  return [array[numbers.reshape(np.shape(indices))]]


def _product(context, array, axes):
  if context.dims() != ():
    raise UnknownError
  return [[kinds.product(np.ravel(array))]]


FOLDS.update(dict.fromkeys(_ARITHMETIC, _compute))
FOLDS.update(
  dict.fromkeys(
    ['Cast', 'ExpandDims', 'Reshape', 'Squeeze'],
    lambda context, array, *_: [array],
  )
)
FOLDS.update(
  Const=lambda context: [known(const_ints(context.node.outputs[0]))],
  ConcatOffset=_concat_offset,
  ConcatV2=lambda context, *arrays: [np.concatenate(arrays[:-1])],
  DynamicStitch=_stitch,
  Fill=_fill,
  GatherV2=_gather,
  InvertPermutation=lambda context, array: [np.argsort(_numbers(*array))],
  Pack=lambda context, *arrays: [np.stack(arrays)],
  Prod=_product,
  Range=_range,
  Slice=_slice,
  StridedSlice=_strided_slice,
  Unpack=lambda context, array: list(array),
)
