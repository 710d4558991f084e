"""Operations on each element, with NumPy's broadcasting."""

from __future__ import annotations

import dataclasses
import operator

from tf_strategies.spmd.kinds import (
  FIRST,
  SUM,
  WHOLE,
  Dim,
  Listed,
  Part,
  Split,
  SplitIfLong,
  Value,
)
from tf_strategies.spmd.plan import Context, Decision, rule
from tf_strategies.spmd.rules import linear

UNARY = [
  'Abs',
  'Acos',
  'Acosh',
  'Angle',
  'AsString',
  'Asin',
  'Asinh',
  'Atan',
  'Atanh',
  'BesselI0e',
  'BesselI1e',
  'Ceil',
  'CheckNumerics',
  'CheckNumericsV2',
  'ComplexAbs',
  'Cos',
  'Cosh',
  'Digamma',
  'Elu',
  'Erf',
  'Erfc',
  'Erfinv',
  'Exp',
  'Expm1',
  'Floor',
  'Imag',
  'Invert',
  'IsFinite',
  'IsInf',
  'IsNan',
  'LeakyRelu',
  'Lgamma',
  'Log',
  'Log1p',
  'LogicalNot',
  'OnesLike',
  'Reciprocal',
  'Relu',
  'Relu6',
  'Rint',
  'Round',
  'Rsqrt',
  'Selu',
  'Sigmoid',
  'Sign',
  'Sin',
  'Sinh',
  'Softplus',
  'Softsign',
  'Sqrt',
  'Square',
  'StaticRegexFullMatch',
  'StaticRegexReplace',
  'StringLength',
  'StringLower',
  'StringStrip',
  'StringToHashBucketFast',
  'StringToHashBucketStrong',
  'StringToNumber',
  'StringUpper',
  'Tan',
  'Tanh',
]

BROADCASTING = [
  'Atan2',
  'BitwiseAnd',
  'BitwiseOr',
  'BitwiseXor',
  'Complex',
  'DivNoNan',
  'EluGrad',
  'Equal',
  'FloorDiv',
  'FloorMod',
  'Greater',
  'GreaterEqual',
  'LeakyReluGrad',
  'LeftShift',
  'Less',
  'LessEqual',
  'LogicalAnd',
  'LogicalOr',
  'Maximum',
  'Minimum',
  'Mul',
  'MulNoNan',
  'NotEqual',
  'Pow',
  'RealDiv',
  'ReciprocalGrad',
  'RegexReplace',
  'Relu6Grad',
  'ReluGrad',
  'RightShift',
  'RsqrtGrad',
  'SelectV2',
  'SeluGrad',
  'SigmoidGrad',
  'SoftplusGrad',
  'SoftsignGrad',
  'SqrtGrad',
  'SquaredDifference',
  'StringJoin',
  'StringToHashBucket',
  'TanhGrad',
  'Xdivy',
  'Xlog1py',
  'Xlogy',
  'ClipByValue',
]


@rule(*UNARY, *BROADCASTING)
def _elementwise(context: Context) -> Decision | None:
  return broadcast(context)


@rule('Select')
def _select(context: Context) -> Decision | None:
  # Its condition may be a vector beside matrices, which broadcasts otherwise.
  ranks = {t.shape.rank for t in context.node.inputs}
  return broadcast(context) if len(ranks) == 1 else None


@rule(*linear.SUMS)
def _sums(context: Context) -> Decision | None:
  kinds = context.kinds
  if all(isinstance(k, Listed) for k in kinds):
    inner = {k.kind for k in kinds} - {None}
    if len(inner) > 1:
      return None
    known = (v for v in context.inputs if v.kind.kind is not None)
    value = next(known, context.inputs[0])
    return Decision(kinds, [dataclasses.replace(value, ints=None)])
  return broadcast(context)


@rule('Bitcast')
def _bitcast(context: Context) -> Decision | None:
  source, result = context.node.inputs[0].dtype, context.node.outputs[0].dtype
  return broadcast(context) if source.size == result.size else None


@rule('Cast')
def _cast(context: Context) -> Decision | None:
  kind = context.kinds[0]
  node = context.node
  # A sum of a short type wraps around, which the parts of it do not show.
  is_short = node.inputs[0].dtype.is_integer and node.inputs[0].dtype.size < 4
  if kind == SUM and node.outputs[0].dtype.is_floating and not is_short:
    return context.summed()
  decision = broadcast(context)
  if decision is not None and node.outputs[0].dtype.is_integer:
    value = decision.outputs[0]
    ints = context.inputs[0].ints if kind == WHOLE else None
    if node.inputs[0].dtype.is_integer:
      ints = None if ints is None else _within(ints, node.outputs[0].dtype)
      decision.outputs = [dataclasses.replace(value, ints=ints)]
  return decision


@rule('Identity', 'EnsureShape', 'PlaceholderWithDefault')
def _identity(context: Context) -> Decision:
  value = context.inputs[0]
  if value.kind == FIRST:
    return context.whole()
  emit = (
    (lambda site, inputs: inputs) if context.node.type != 'Identity' else None
  )
  dims = context.dims() if value.dims is None else value.dims
  return Decision(
    [value.kind],
    [dataclasses.replace(value, dims=dims)],
    emit,
  )


@rule('IdentityN')
def identity_n(context: Context) -> Decision | None:
  """Returns all inputs in their own kinds."""
  if FIRST in context.kinds:
    return None
  return Decision(
    context.kinds, list(context.inputs), lambda site, inputs: inputs
  )


@rule('ZerosLike')
def _zeros_like(context: Context) -> Decision | None:
  value = context.inputs[0]
  if value.kind == FIRST:
    return None
  kind = WHOLE if isinstance(value.kind, Part) else value.kind
  return Decision([value.kind], [Value(kind, value.dims)])


@rule('LookupTableFindV2')
def _look_up(context: Context) -> Decision:
  keys = context.inputs[1]
  kind = keys.kind if isinstance(keys.kind, Split) else WHOLE
  return Decision([WHOLE, kind, WHOLE], [Value(kind, keys.dims)])


def _has_split(kinds) -> bool:
  return any(isinstance(k, Split) for k in kinds)


def _dims(context) -> tuple[Dim, ...] | None:
  """The lengths of the output, with the symbols of the inputs where they tell."""
  dims = context.dims()
  if dims is None or any(v.dims is None for v in context.inputs):
    return dims
  found = []
  for axis, dim in enumerate(dims):
    candidates = set()
    for value in context.inputs:
      at = axis - (len(dims) - len(value.dims))
      if at >= 0 and value.dims[at] != Dim(1):
        candidates.add(value.dims[at])
    found.append(
      candidates.pop() if dim.symbols and len(candidates) == 1 else dim
    )
  return tuple(found)


# Arithmetic with lengths and axes.
_INTEGERS = {
  'Add': operator.add,
  'AddV2': operator.add,
  'FloorDiv': operator.floordiv,
  'FloorMod': operator.mod,
  'Maximum': max,
  'Minimum': min,
  'Mul': operator.mul,
  'Sub': operator.sub,
}


def _ints(context) -> tuple[Dim | None, ...] | None:
  """The contents of a small tensor of integers, made of two others."""
  compute = _INTEGERS.get(context.node.type)
  found = [v.ints for v in context.inputs]
  if compute is None or any(ints is None for ints in found):
    return None
  length = max(map(len, found))
  if any(len(ints) not in (1, length) for ints in found):
    return None
  columns = [ints * length if len(ints) == 1 else ints for ints in found]
  return _within(
    [
      _of_two(context.node.type, compute, *pair)
      for pair in zip(*columns, strict=True)
    ],
    context.node.outputs[0].dtype,
  )


def _within(ints, dtype) -> tuple[Dim | None, ...]:
  """Contents of a dtype: what does not fit, TensorFlow wraps around."""

  def fits(dim):
    if dim is None or (dim.symbols and dtype.size < 4):
      return False
    return dtype.min <= dim.number <= dtype.max

  return tuple(dim if fits(dim) else None for dim in ints)


def _of_two(kind, compute, one, other):
  if one is None or other is None:
    return None
  if one.is_number and other.is_number:
    is_division = kind in ('FloorDiv', 'FloorMod')
    if is_division and other.number == 0:
      return None
    return Dim(compute(one.number, other.number))
  if kind == 'Mul':
    return one.times(other)
  return one.over(other) if kind == 'FloorDiv' else None


def broadcast(context: Context) -> Decision | None:
  """Splits along the axis of the output along which inputs are split."""
  values = context.inputs
  if not _has_split(context.kinds):
    if all(k == WHOLE for k in context.kinds):
      return context.whole(dims=_dims(context), ints=_ints(context))
    return None
  if any(v.dims is None for v in values) or context.dims() is None:
    return None
  rank = len(context.dims())
  axis = length = None
  for value in values:
    if isinstance(value.kind, Split) and axis is None:
      axis = value.kind.axis + rank - len(value.dims)
      length = value.dims[value.kind.axis]
  wants = [split_along(v, axis - (rank - len(v.dims)), length) for v in values]
  return Decision(wants, [context.split(axis, length, dims=_dims(context))])


def split_along(value, axis: int, length: Dim):
  """Returns the wanted kind of an input beside one that is split along `axis`."""
  if axis < 0 or value.dims[axis] == Dim(1):
    return WHOLE
  if value.kind == Split(axis):
    return value.kind
  dim = value.dims[axis]
  if dim == length or dim.is_number or dim.has_batch:
    return Split(axis)
  return SplitIfLong(axis)
