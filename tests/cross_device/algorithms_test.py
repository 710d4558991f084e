"""Every op is exact and keeps devices, for every dtype, shape and device count."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices
from tests.collectives.simulator import simulate
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM

virtual_devices.configure()

# A scalar, no elements, a prime length, a matrix, a matrix without rows, and
# one large matrix, which ops that split tensors split.
SHAPES = ((), (0,), (97,), (6, 7), (0, 3), (61, 53))


def all_reduce(op, reduce_op, values):
  """Reduces all values in one call, as a strategy reduces its gradients."""
  return op.batch_reduce(reduce_op, [(v, v) for v in values])


class EveryOpTest(tf.test.TestCase, parameterized.TestCase):
  def assert_result(self, op, world_size, reduce_op, cases):
    names = replicas.devices(world_size)
    arrays = [
      replicas.inputs(dtype, shape, world_size, reduce_op)
      for dtype, shape in cases
    ]
    reduced = all_reduce(
      op, reduce_op, [replicas.on_devices(a, names) for a in arrays]
    )
    schedule = op.schedule(names, 1)
    for ranks, result in zip(arrays, reduced, strict=True):
      expected = replicas.exact(ranks, reduce_op)
      replicas.assert_equal(result, expected, names)
      # The NumPy simulation gives the same sums on each rank.
      for simulated in simulate(schedule, ranks).outputs:
        np.testing.assert_array_equal(simulated, replicas.exact(ranks))

  @tiers.product(
    op=list(replicas.OPS),
    world_size=(tiers.soak(2), 3, tiers.soak(4), tiers.soak(8)),
    reduce_op=(tiers.soak(SUM), MEAN),
  )
  def test_every_dtype_and_shape_in_one_call(self, op, world_size, reduce_op):
    cases = [
      (dtype, shape) for dtype in replicas.DTYPES for shape in SHAPES[:-1]
    ]
    cases.append(('float32', SHAPES[-1]))
    self.assert_result(replicas.OPS[op](), world_size, reduce_op, cases)

  @tiers.product(op=list(replicas.OPS), world_size=(3, tiers.soak(8)))
  def test_replicas_are_equal_to_the_last_bit(self, op, world_size):
    names = replicas.devices(world_size)
    random = np.random.default_rng(0)
    for reduce_op in (SUM, MEAN):
      ranks = random.normal(size=(world_size, 1009)).astype(np.float32)
      value = replicas.on_devices(ranks, names)
      result = replicas.OPS[op]().reduce(reduce_op, value, value).values
      bits = [component.numpy().view(np.int32) for component in result]
      for other in bits[1:]:
        np.testing.assert_array_equal(other, bits[0])
      self.assertAllClose(
        result[0], replicas.exact(ranks, reduce_op), rtol=1e-5, atol=1e-5
      )

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_what_is_not_finite_reaches_all_in_any_order_of_devices(
    self, make_op
  ):
    names = tuple(map(virtual_devices.name, (5, 0, 7, 2)))
    ranks = np.zeros([4, 67], np.float32) + np.arange(67, dtype=np.float32)
    ranks[2, 5] = np.nan
    ranks[0, 40] = np.inf
    ranks[1, 66] = -np.inf
    ranks[:2, 20] = np.inf, -np.inf
    expected = 4 * np.arange(67, dtype=np.float32)
    expected[[5, 40, 66, 20]] = np.nan, np.inf, -np.inf, np.nan
    value = replicas.on_devices(ranks, names)
    replicas.assert_equal(make_op().reduce(SUM, value, value), expected, names)


class PrecisionTest(tf.test.TestCase, parameterized.TestCase):
  """16-bit floats are added in float32, and a mean does not overflow on the way."""

  @parameterized.parameters('direct', 'naive', 'auto')
  def test_one_hop_adds_in_float32(self, name):
    make_op = replicas.OPS[name]
    # 256 + 1 is no bfloat16: summing in it would lose all additions.
    ranks = [tf.constant([v], tf.bfloat16) for v in (256.0, 1.0, 1.0, 1.0)]
    names = replicas.devices(4)
    value = replicas.on_devices(ranks, names)
    expected = np.array([260.0], tf.bfloat16.as_numpy_dtype)  # 259, rounded.
    replicas.assert_equal(make_op().reduce(SUM, value, value), expected, names)
    alone = make_op().reduce(SUM, value, virtual_devices.name(6))
    np.testing.assert_array_equal(alone.numpy(), expected, strict=True)

  @tiers.product(
    op=list(replicas.OPS), world_size=(4, tiers.soak(2), tiers.soak(8))
  )
  def test_mean_of_large_float16(self, op, world_size):
    names = replicas.devices(world_size)
    ranks = [np.full([99], 61440, np.float16) for _ in names]
    value = replicas.on_devices(ranks, names)
    op = replicas.OPS[op]()
    replicas.assert_equal(op.reduce(MEAN, value, value), ranks[0], names)
    alone = op.reduce(MEAN, value, virtual_devices.name(6))
    np.testing.assert_array_equal(alone.numpy(), ranks[0], strict=True)


if __name__ == '__main__':
  tf.test.main()
