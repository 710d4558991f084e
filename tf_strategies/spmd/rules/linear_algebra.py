"""Products of matrices, convolutions, pooling, and whatever works image by image."""

from __future__ import annotations

import tensorflow as tf

from tf_strategies.spmd.kinds import SUM, WHOLE, Dim, Split
from tf_strategies.spmd.plan import Context, Decision, rule


@rule('MatMul')
def _mat_mul(context: Context) -> Decision | None:
  node = context.node
  a = 'ji' if node.attr('transpose_a') else 'ij'
  b = 'kj' if node.attr('transpose_b') else 'jk'
  return _product(context, (a, b), 'ik')


@rule('BatchMatMulV2', 'BatchMatMulV3')
def _batch_mat_mul(context: Context) -> Decision | None:
  node = context.node
  a = 'ji' if node.attr('adj_x') else 'ij'
  b = 'kj' if node.attr('adj_y') else 'jk'
  values, dims = context.inputs, context.dims()
  if dims is None or any(v.dims is None for v in values):
    return None
  batch = [chr(ord('A') + i) for i in range(len(dims) - 2)]
  terms = []
  for value, matrix in zip(values, (a, b), strict=True):
    count = len(value.dims) - 2
    labels = batch[len(batch) - count :]
    # A repeated axis of length 1 gets a name of its own.
    labels = [
      label.lower() + "'" if value.dims[i] == Dim(1) else label
      for i, label in enumerate(labels)
    ]
    terms.append([*labels, *matrix])
  return _product(context, terms, [*batch, 'i', 'k'])


@rule('Einsum')
def _einsum(context: Context) -> Decision | None:
  equation = context.node.attr('equation').decode().replace(' ', '')
  inputs, _, output = equation.partition('->')
  terms = inputs.split(',')
  if any(v.dims is None for v in context.inputs):
    return None
  ranks = [
    len(v.dims) - len(t.replace('...', ''))
    for v, t in zip(context.inputs, terms, strict=True)
  ]
  most = max(ranks)

  def labels(term, rank):
    before, dots, after = term.partition('...')
    shared = [f'.{most - rank + i}' for i in range(rank)] if dots else []
    return [*before, *shared, *after]

  terms = [labels(t, r) for t, r in zip(terms, ranks, strict=True)]
  if any(len(set(t)) != len(t) for t in terms):
    return None
  terms = [
    [
      label + "'" if label[0] == '.' and v.dims[i] == Dim(1) else label
      for i, label in enumerate(t)
    ]
    for t, v in zip(terms, context.inputs, strict=True)
  ]
  return _product(context, terms, labels(output, most))


def _product(context, terms, output) -> Decision | None:
  """A sum of products over axes with names: of one or two tensors."""
  values = context.inputs
  if SUM in context.kinds:
    return None
  for value, term in zip(values, terms, strict=True):
    if not isinstance(value.kind, Split):
      continue
    label = term[value.kind.axis]
    wants = [
      Split(list(t).index(label)) if label in t else WHOLE for t in terms
    ]
    if label not in output:
      return Decision(wants, [context.out(SUM)])
    length = value.dims[value.kind.axis]
    at = list(output).index(label)
    return Decision(wants, [context.split(at, length)])
  return None


# Operations that compute row by row: the inputs that have rows.
_ROWS = {
  **dict.fromkeys(
    [
      'AdjustContrastv2',
      'AdjustHue',
      'AdjustSaturation',
      'AvgPool',
      'AvgPool3D',
      'BiasAdd',
      'Cholesky',
      'Conv2D',
      'Conv3D',
      'DepthToSpace',
      'DepthwiseConv2dNative',
      'Dilation2D',
      'ExtractImagePatches',
      'FFT',
      'FFT2D',
      'HSVToRGB',
      'IFFT',
      'LogSoftmax',
      'LRN',
      'MatrixBandPart',
      'MatrixDeterminant',
      'MatrixDiagPartV3',
      'MatrixInverse',
      'MaxPool',
      'MaxPool3D',
      'ResizeArea',
      'ResizeBicubic',
      'ResizeBilinear',
      'ResizeNearestNeighbor',
      'ResizeNearestNeighborGrad',
      'RGBToHSV',
      'Softmax',
      'SpaceToDepth',
      'TopKV2',
    ],
    (0,),
  ),
  'AvgPool3DGrad': (1,),
  'AvgPoolGrad': (1,),
  'Conv2DBackpropInput': (2,),
  'Conv3DBackpropInputV2': (2,),
  'DepthwiseConv2dNativeBackpropInput': (2,),
  'ImageProjectiveTransformV3': (0, 1),
  'InTopKV2': (0, 1),
  'MaxPool3DGrad': (0, 1, 2),
  'MaxPoolGrad': (0, 1, 2),
  'MaxPoolGradGrad': (0, 1, 2),
  'ResizeBicubicGrad': (0, 1),
  'ResizeBilinearGrad': (0, 1),
}
# How many of the last axes they compute with together; all but the first of others.
_LAST = {
  'BiasAdd': 1,
  'Cholesky': 2,
  'FFT': 1,
  'FFT2D': 2,
  'IFFT': 1,
  'LogSoftmax': 1,
  'MatrixBandPart': 2,
  'MatrixDeterminant': 2,
  'MatrixDiagPartV3': 2,
  'MatrixInverse': 2,
  'Softmax': 1,
  'TopKV2': 1,
}
# The first input of these is the shape of the result.
_OF_SHAPE = (
  'AvgPool3DGrad',
  'AvgPoolGrad',
  'Conv2DBackpropInput',
  'Conv3DBackpropInputV2',
  'DepthwiseConv2dNativeBackpropInput',
)


@rule(*_ROWS)
def _row_by_row(context: Context) -> Decision | None:
  name = context.node.type
  batched = [context.inputs[i] for i in _ROWS[name]]
  split = next((v for v in batched if isinstance(v.kind, Split)), None)
  if split is None or any(v.dims is None for v in batched):
    return None
  axis = split.kind.axis
  if axis >= split.rank - _LAST.get(name, split.rank - 1):
    return None
  if name == 'MatrixDiagPartV3' and context.inputs[1].dims != ():
    return None  # Several diagonals.
  wants = [WHOLE] * len(context.inputs)
  for i, value in zip(_ROWS[name], batched, strict=True):
    if value.dims[axis] != Dim(1):  # Else it belongs to all rows.
      wants[i] = Split(axis)
  outputs = [
    context.split(axis, split.dims[axis], i)
    for i in range(len(context.node.outputs))
  ]
  emit = context.with_own_shape(0, axis) if name in _OF_SHAPE else None
  return Decision(wants, outputs, emit)


@rule(
  'Conv2DBackpropFilter',
  'Conv3DBackpropFilterV2',
  'DepthwiseConv2dNativeBackpropFilter',
)
def _filter_gradient(context: Context) -> Decision | None:
  images, _, value = context.inputs
  if Split(0) in (images.kind, value.kind):
    return context.summed([Split(0), WHOLE, Split(0)])
  return None


@rule('MatrixDiagV3')
def _diagonal(context: Context) -> Decision | None:
  value, diagonals, *_ = context.inputs
  if value.dims is None or diagonals.numbers != (0,):
    return None
  node = context.node
  lengths = [d.number if d.is_number else None for d in value.dims]
  if isinstance(value.kind, Split):
    if value.kind.axis == len(value.dims) - 1:
      return None
    lengths[value.kind.axis] = None

  def emit(site, inputs):
    # In a function TensorFlow forgets lengths, and fails if it knows only some.
    inputs = [tf.ensure_shape(inputs[0], lengths), *inputs[1:]]
    return site.op(node, inputs)

  if isinstance(value.kind, Split):
    return context.along(emit=emit)
  return context.whole(emit)


@rule('SoftmaxCrossEntropyWithLogits', 'SparseSoftmaxCrossEntropyWithLogits')
def _cross_entropy(context: Context) -> Decision | None:
  if Split(0) not in context.kinds:
    return None
  if any(v.dims is None or v.dims[0] == Dim(1) for v in context.inputs):
    return None  # One row beside all others.
  length = next(v.dims[0] for v in context.inputs if v.kind == Split(0))
  # The gradients are as long as the logits, of which TensorFlow may know less.
  logits = context.inputs[0].dims
  return Decision(
    [Split(0), Split(0)],
    [context.split(0, length, 0), context.split(0, length, 1, logits)],
  )
