"""Operations on each element, with NumPy's broadcasting, and linear operations.

Linear operations turn parts of a sum into parts of a sum."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_strategies import _tf_internal
from tf_strategies.spmd.kinds import WHOLE, Listed, Part, Value, one_list
from tf_strategies.spmd.plan import (
  FACTORS,
  TERMS,
  Context,
  Decision,
  is_sum,
  rule,
)

# Operations that add up all inputs, or change each element in a linear way.
SUMS = [
  'Add',
  'AddN',
  'AddV2',
  'Conj',
  'Neg',
  'Real',
  'Sub',
]
# Operations on each element of one input, or of several that broadcast.
ELEMENTWISE = [
  *(_tf_internal.elementwise_operations - {*SUMS}),
  'AsString',
  'Bitcast',
  'CheckNumerics',
  'CheckNumericsV2',
  'ClipByValue',
  'EluGrad',
  'Equal',
  'LeakyRelu',
  'LeakyReluGrad',
  'NotEqual',
  'OnesLike',
  'ReciprocalGrad',
  'RegexReplace',
  'Relu6Grad',
  'ReluGrad',
  'RsqrtGrad',
  'Select',
  'SelectV2',
  'SeluGrad',
  'SigmoidGrad',
  'SoftplusGrad',
  'SoftsignGrad',
  'SqrtGrad',
  'StaticRegexFullMatch',
  'StaticRegexReplace',
  'StringJoin',
  'StringLength',
  'StringLower',
  'StringStrip',
  'StringToHashBucket',
  'StringToHashBucketFast',
  'StringToHashBucketStrong',
  'StringToNumber',
  'StringUpper',
  'TanhGrad',
]


@rule(*SUMS)
def _sums(context):
  kinds = context.kinds
  if all(isinstance(k, Listed) for k in kinds):
    value = one_list(context.inputs)
    return value and Decision(kinds, [dataclasses.replace(value, ints=None)])
  if context.node.outputs[0].dtype == tf.variant:
    return None
  return broadcast(context)


@rule('Cast')
def _cast(context):
  source, result = context.node.inputs[0].dtype, context.node.outputs[0].dtype
  # A sum of a short type wraps around, which the parts of it do not show.
  is_short = source.is_integer and source.size < 4
  if is_sum(context.kinds[0]) and result.is_floating and not is_short:
    return context.summed()
  return broadcast(context)


@rule(
  'EnsureShape',
  'Identity',
  'IdentityN',
  'PlaceholderWithDefault',
  'PreventGradient',
  'StopGradient',
)
def identity(context: Context) -> Decision:
  """Returns inputs in their own kinds."""
  outputs = [
    dataclasses.replace(value, dims=context.dims(i))
    if value.dims is None
    else value
    for i, value in enumerate(context.inputs)
  ]
  return Decision(context.kinds, outputs, lambda site, inputs: inputs)


@rule('ZerosLike')
def _zeros_like(context):
  value = context.inputs[0]
  kind = WHOLE if isinstance(value.kind, Part) else value.kind
  return Decision([value.kind], [Value(kind, value.dims)])


@rule('LookupTableFindV2')
def _look_up(context):
  keys = context.names(1)
  return context.by_axes([[], keys], [keys], dims=context.inputs[1].dims)


@rule(*ELEMENTWISE)
def broadcast(context: Context) -> tuple | None:
  """Splits along the axis of the output along which inputs are split."""
  count = len(context.inputs)
  rank = max(map(context.rank, range(count)))
  if context.node.outputs[0].shape.rank != rank:
    return None  # A bitcast to another size adds or takes an axis.
  names = [range(rank - context.rank(i), rank) for i in range(count)]
  if context.node.type == 'Select':  # Its condition may choose rows.
    names[0] = range(context.rank())
  return names, [range(rank)]


TERMS.update(dict.fromkeys([*SUMS, 'Pack'], slice(None)))
TERMS.update(ConcatV2=slice(-1), SelectV2=slice(1, None))

_FIRST = [
  'BiasAddGrad',
  'ConjugateTranspose',
  'Cumsum',
  'DivNoNan',
  'ExpandDims',
  'GatherV2',
  'Pad',
  'RealDiv',
  'ResizeBilinear',
  'ReverseV2',
  'Roll',
  'Slice',
  'SplitV',
  'Squeeze',
  'StridedSlice',
  'Sum',
  'Transpose',
  'Unpack',
  'UnsortedSegmentSum',
]
_PRODUCTS = [
  'BatchMatMulV2',
  'BatchMatMulV3',
  'Conv2D',
  'Conv3D',
  'DepthwiseConv2dNative',
  'Einsum',
  'MatMul',
  'Mul',
  'MulNoNan',
]

FACTORS.update(dict.fromkeys(_FIRST, (0,)))
FACTORS.update(dict.fromkeys(_PRODUCTS, (0, 1)))
FACTORS.update(
  Conv2DBackpropInput=(2,),
  Conv3DBackpropInputV2=(2,),
  DepthwiseConv2dNativeBackpropInput=(2,),
  ScatterNd=(1,),
  Split=(1,),
  StridedSliceGrad=(4,),
)
