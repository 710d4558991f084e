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


@rule('BatchMatMul', 'BatchMatMulV2', 'BatchMatMulV3')
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
    # What is repeated is another axis than the one that it is repeated along.
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
  kinds = context.kinds
  sums = [i for i, k in enumerate(kinds) if k == SUM]
  if sums:
    if len(sums) == 1 and all(k in (SUM, WHOLE) for k in kinds):
      return Decision(kinds, [context.out(SUM)])
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


# The first input is a batch of images, the others belong to all of them.
_IMAGES = [
  'AdjustContrastv2',
  'AdjustHue',
  'AdjustSaturation',
  'AvgPool',
  'AvgPool3D',
  'BiasAdd',
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
  'MaxPoolV2',
  'ResizeArea',
  'ResizeBicubic',
  'ResizeBilinear',
  'ResizeNearestNeighbor',
  'RGBToHSV',
  'SpaceToDepth',
  'ResizeNearestNeighborGrad',
]
_LINEAR_IMAGES = (
  'Conv2D',
  'Conv3D',
  'DepthwiseConv2dNative',
  'ResizeBilinear',
)


@rule(*_IMAGES)
def _images(context: Context) -> Decision | None:
  first = context.inputs[0]
  is_linear = context.node.type in _LINEAR_IMAGES
  if first.kind == SUM and is_linear and context.kinds.count(SUM) == 1:
    return context.summed()
  is_split = isinstance(first.kind, Split)
  if is_split and context.node.type == 'BiasAdd':
    is_split = first.kind.axis < len(first.dims) - 1
  elif is_split:
    is_split = first.kind == Split(0)
  return context.along() if is_split else None


# Operations all of whose inputs are batches of images.
@rule(
  'MaxPoolGrad',
  'MaxPoolGradV2',
  'MaxPool3DGrad',
  'MaxPoolGradGrad',
  'ResizeBilinearGrad',
  'ResizeBicubicGrad',
)
def _image_gradients(context: Context) -> Decision | None:
  split = [v for v in context.inputs if v.kind == Split(0)]
  if not split:
    return None
  rank = len(split[0].dims)
  if any(v.dims is None for v in context.inputs):
    return None
  wants = [Split(0) if len(v.dims) == rank else WHOLE for v in context.inputs]
  return Decision(wants, [context.split(0, split[0].dims[0])])


# The first input is the shape of the output, whose first axis is the batch's.
@rule('AvgPoolGrad', 'AvgPool3DGrad')
def _pool_gradient(context: Context) -> Decision | None:
  value = context.inputs[1]
  if value.kind != Split(0):
    return None
  return Decision(
    [WHOLE, value.kind],
    [context.split(0, value.dims[0])],
    context.with_own_shape(0, 0),
  )


_INPUT_GRADIENTS = (
  'Conv2DBackpropInput',
  'Conv3DBackpropInputV2',
  'DepthwiseConv2dNativeBackpropInput',
)
_FILTER_GRADIENTS = (
  'Conv2DBackpropFilter',
  'Conv3DBackpropFilterV2',
  'DepthwiseConv2dNativeBackpropFilter',
)


@rule(*_INPUT_GRADIENTS)
def _input_gradient(context: Context) -> Decision | None:
  _, filters, value = context.inputs
  if value.kind == Split(0):
    return Decision(
      [WHOLE, WHOLE, Split(0)],
      [context.split(0, value.dims[0])],
      context.with_own_shape(0, 0),
    )
  if value.kind == SUM and filters.kind == WHOLE:
    return Decision([WHOLE, WHOLE, SUM], [context.out(SUM)])
  return None


@rule(*_FILTER_GRADIENTS)
def _filter_gradient(context: Context) -> Decision | None:
  images, _, value = context.inputs
  if Split(0) in (images.kind, value.kind):
    return Decision([Split(0), WHOLE, Split(0)], [context.out(SUM)])
  return None


# Each row by itself: the last axes are one matrix, or one row of classes.
_CORE = {
  'BatchFFT': 1,
  'Cholesky': 2,
  'FFT': 1,
  'FFT2D': 2,
  'IFFT': 1,
  'InTopKV2': 1,
  'LogSoftmax': 1,
  'MatrixBandPart': 2,
  'MatrixDeterminant': 2,
  'MatrixDiag': 1,
  'MatrixDiagPart': 2,
  'MatrixDiagPartV3': 2,
  'MatrixInverse': 2,
  'Softmax': 1,
  'TopKV2': 1,
}


@rule(*_CORE)
def _rows(context: Context) -> Decision | None:
  value = context.inputs[0]
  if not isinstance(value.kind, Split):
    return None
  axis = value.kind.axis
  if axis >= len(value.dims) - _CORE[context.node.type]:
    return None
  if context.node.type == 'MatrixDiagPartV3' and context.inputs[1].dims != ():
    return None  # Several diagonals.
  decision = context.along()
  if context.node.type == 'InTopKV2':
    decision.wants[1] = value.kind
  return decision


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


@rule('ImageProjectiveTransformV2', 'ImageProjectiveTransformV3')
def _transform(context: Context) -> Decision | None:
  images, transforms, *_ = context.inputs
  if images.kind != Split(0) or transforms.dims is None:
    return None
  decision = context.along()
  if transforms.dims[0] != Dim(1):
    decision.wants[1] = Split(0)
  return decision
