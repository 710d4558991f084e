"""Products of matrices, convolutions, pooling, and whatever works image by image."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_strategies.spmd.kinds import Split
from tf_strategies.spmd.plan import rule


@rule('MatMul', 'BatchMatMulV2', 'BatchMatMulV3')
def _mat_mul(context):
  attr = context.node.attr
  a = 'ji' if attr('transpose_a') or attr('adj_x') else 'ij'
  b = 'kj' if attr('transpose_b') or attr('adj_y') else 'jk'
  # Positions from the end, since the first axes may be repeated.
  names = [
    [*range(-context.rank(i), -2), *matrix] for i, matrix in enumerate((a, b))
  ]
  batch = max((n[:-2] for n in names), key=len)
  return names, [[*batch, 'i', 'k']], 'sum'


@rule('Einsum')
def _einsum(context):
  equation = context.node.attr('equation').decode().replace(' ', '')
  inputs, _, output = equation.partition('->')
  terms = inputs.split(',')
  hidden = [
    context.rank(i) - len(t.replace('...', '')) for i, t in enumerate(terms)
  ]

  def names(term, count):
    before, dots, after = term.partition('...')
    found = [*before, *(range(-count, 0) if dots else ()), *after]
    return [n if found.count(n) == 1 else None for n in found]

  return list(map(names, terms, hidden)), [names(output, max(hidden))], 'sum'


# Operations that compute row by row: the inputs that have rows, and how many of the
# last axes they compute with together (None: all but the first).
_ROWS = {
  **dict.fromkeys(
    [
      'AdjustContrastv2',
      'AdjustHue',
      'AdjustSaturation',
      'AvgPool',
      'AvgPool3D',
      'Conv2D',
      'Conv3D',
      'DepthToSpace',
      'DepthwiseConv2dNative',
      'Dilation2D',
      'ExtractImagePatches',
      'HSVToRGB',
      'LRN',
      'MaxPool',
      'MaxPool3D',
      'ResizeArea',
      'ResizeBicubic',
      'ResizeBilinear',
      'ResizeNearestNeighbor',
      'ResizeNearestNeighborGrad',
      'RGBToHSV',
      'SpaceToDepth',
    ],
    ((0,), None),
  ),
  **dict.fromkeys(
    ['BiasAdd', 'FFT', 'IFFT', 'LogSoftmax', 'Softmax', 'TopKV2'], ((0,), 1)
  ),
  **dict.fromkeys(
    [
      'Cholesky',
      'FFT2D',
      'MatrixBandPart',
      'MatrixDeterminant',
      'MatrixInverse',
    ],
    ((0,), 2),
  ),
  # The first input of these is the shape of the result.
  **dict.fromkeys(['AvgPool3DGrad', 'AvgPoolGrad'], ((1,), None)),
  **dict.fromkeys(
    [
      'Conv2DBackpropInput',
      'Conv3DBackpropInputV2',
      'DepthwiseConv2dNativeBackpropInput',
    ],
    ((2,), None),
  ),
  **dict.fromkeys(
    [
      'ImageProjectiveTransformV3',
      'InTopKV2',
      'ResizeBicubicGrad',
      'ResizeBilinearGrad',
    ],
    ((0, 1), None),
  ),
  **dict.fromkeys(
    ['MaxPool3DGrad', 'MaxPoolGrad', 'MaxPoolGradGrad'], ((0, 1, 2), None)
  ),
}


@rule(*_ROWS)
def _row_by_row(context):
  with_rows, last = _ROWS[context.node.type]
  ranks = [context.rank(i) for i in with_rows]
  rows = 1 if last is None else ranks[0] - last
  names = [[] for _ in context.inputs]
  for i, rank in zip(with_rows, ranks, strict=True):
    names[i] = [*range(rows), *[None] * (rank - rows)]
  return context.by_axes(
    names,
    [range(rows)] * len(context.node.outputs),
    shape=None if 0 in with_rows else 0,
  )


@rule('SoftmaxCrossEntropyWithLogits', 'SparseSoftmaxCrossEntropyWithLogits')
def _cross_entropy(context):
  names = [[0, *[None] * (context.rank(i) - 1)] for i in range(2)]
  decision = context.by_axes(names, [[0], [0]])
  if isinstance(decision.outputs[1].kind, Split):
    # As long as the logits, of which TensorFlow may know less.
    gradient = dataclasses.replace(
      decision.outputs[1], dims=context.inputs[0].dims
    )
    decision.outputs = [decision.outputs[0], gradient]
  return decision


@rule(
  'Conv2DBackpropFilter',
  'Conv3DBackpropFilterV2',
  'DepthwiseConv2dNativeBackpropFilter',
)
def _filter_gradient(context):
  names = [0, *[None] * (context.rank() - 1)]
  return [names, [], names], [[]], 'sum'


@rule('MatrixDiagPartV3')
def _diagonal_part(context):
  if context.inputs[1].dims != ():
    return None  # Several diagonals.
  names = context.names(0, [-1, -2])
  return [names], [names[:-2]]


@rule('MatrixDiagV3')
def _diagonal(context):
  if context.numbers(1) != (0,):
    return None
  node, names = context.node, context.names(0, [-1])
  lengths = [d.number if d.is_number else None for d in context.inputs[0].dims]

  def emit(site, inputs):
    # In a function TensorFlow forgets lengths, and fails if it knows only some.
    inputs = [tf.ensure_shape(inputs[0], lengths), *inputs[1:]]
    return site.op(node, inputs)

  decision = context.by_axes([names], [names])
  decision.emit = emit
  return decision
