"""Linear operations, which turn parts of a sum into parts of a sum."""

from __future__ import annotations

from tf_strategies.spmd import plan

# Operations that add up all inputs, or change each element in a linear way.
SUMS = [
  'Add',
  'AddN',
  'AddV2',
  'Conj',
  'Neg',
  'PreventGradient',
  'Real',
  'StopGradient',
  'Sub',
]

plan.TERMS.update(dict.fromkeys([*SUMS, 'Pack'], slice(None)))
plan.TERMS.update(ConcatV2=slice(-1), SelectV2=slice(1, None))

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

plan.FACTORS.update(dict.fromkeys(_FIRST, (0,)))
plan.FACTORS.update(dict.fromkeys(_PRODUCTS, (0, 1)))
plan.FACTORS.update(
  Conv2DBackpropInput=(2,),
  Conv3DBackpropInputV2=(2,),
  DepthwiseConv2dNativeBackpropInput=(2,),
  ScatterNd=(1,),
  Split=(1,),
  StridedSliceGrad=(4,),
)
