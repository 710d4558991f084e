"""Tensors whose shapes are unknown while the graph is built."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM

virtual_devices.configure()

_COUNT = 4


def function_of(op, reduce_op, specs):
  """Returns a function that all-reduces `[tensor][rank]` with the shapes in `specs`."""
  names = replicas.devices(_COUNT)
  signature = [[tf.TensorSpec(*spec)] * _COUNT for spec in specs]

  @tf.function(input_signature=[signature])
  def step(values):
    values = [replicas.on_devices(v, names) for v in values]
    reduced = op.batch_reduce(reduce_op, [(v, v) for v in values])
    for value, spec in zip(reduced, specs, strict=True):
      for component in value.values:
        component.shape.assert_is_compatible_with(tf.TensorShape(spec[0]))
    return [r.values for r in reduced]

  return step


class DynamicShapesTest(tf.test.TestCase, parameterized.TestCase):
  def assert_result(self, step, reduce_op, shapes, dtypes):
    arrays = [
      replicas.inputs(dtype, shape, _COUNT, reduce_op)
      for dtype, shape in zip(dtypes, shapes, strict=True)
    ]
    outputs = step([[tf.constant(a) for a in ranks] for ranks in arrays])
    for ranks, found in zip(arrays, outputs, strict=True):
      for component in found:
        np.testing.assert_array_equal(
          component.numpy(), replicas.exact(ranks, reduce_op), strict=True
        )

  @parameterized.parameters('auto', 'ring')
  def test_one_graph_for_every_length(self, op):
    op = replicas.OPS[op]()
    step = function_of(op, MEAN, [([None], tf.float32)])
    for length in (0, 1, 3, 97, 4099):
      self.assert_result(step, MEAN, [(length,)], ['float32'])
    self.assertEqual(op.calls, 5)
    self.assertEqual(step.experimental_get_tracing_count(), 1)

  @tiers.named_parameters(*tiers.few(replicas.NAMED_OPS, 'auto', 'ring'))
  def test_matrices_beside_known_shapes(self, make_op):
    specs = [
      ([None, None], tf.float32),
      ([5, None], tf.int64),
      ([13], tf.float32),
      (None, tf.bfloat16),
    ]
    step = function_of(make_op(), SUM, specs)
    dtypes = [spec[1].name for spec in specs]
    for shapes in (
      [(6, 7), (5, 3), (13,), (2, 2, 3)],
      [(0, 7), (5, 0), (13,), ()],
      [(67, 31), (5, 211), (13,), (97,)],
    ):
      self.assert_result(step, SUM, shapes, dtypes)


if __name__ == '__main__':
  tf.test.main()
