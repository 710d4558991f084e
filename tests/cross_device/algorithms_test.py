"""Every op is exact and keeps devices, for every dtype, shape and device count."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices
from tests.collectives.simulator import simulate
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM
from tf_strategies import cross_device

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

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_in_a_function(self, make_op):
    names = replicas.devices(4)
    op = make_op()
    cases = [(d, s) for d in ('float32', 'int32') for s in SHAPES]
    cases += [('float16', (97,)), ('complex64', (6, 7))]
    arrays = [replicas.inputs(d, s, 4, MEAN) for d, s in cases]
    devices = []

    @tf.function
    def step(values):
      values = [replicas.on_devices(v, names) for v in values]
      reduced = all_reduce(op, MEAN, values)
      devices.extend([c.device for c in r.values] for r in reduced)
      return [r.values for r in reduced]

    for found, ranks in zip(
      step([[tf.constant(a) for a in ranks] for ranks in arrays]),
      arrays,
      strict=True,
    ):
      for component in found:
        np.testing.assert_array_equal(
          component.numpy(), replicas.exact(ranks, MEAN), strict=True
        )
    # Checks the graph, because values that a function returns have lost their
    # device.
    for placed in devices:
      self.assertEqual(
        [d.rpartition('device:')[2] for d in placed], list(names)
      )

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
  def test_what_is_not_finite_reaches_all(self, make_op):
    names = replicas.devices(4)
    ranks = np.zeros([4, 67], np.float32) + np.arange(67, dtype=np.float32)
    ranks[2, 5] = np.nan
    ranks[0, 40] = np.inf
    ranks[1, 66] = -np.inf
    ranks[:2, 20] = np.inf, -np.inf
    expected = 4 * np.arange(67, dtype=np.float32)
    expected[[5, 40, 66, 20]] = np.nan, np.inf, -np.inf, np.nan
    value = replicas.on_devices(ranks, names)
    replicas.assert_equal(make_op().reduce(SUM, value, value), expected, names)

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_devices_in_another_order(self, make_op):
    names = (
      virtual_devices.name(5),
      virtual_devices.name(0),
      virtual_devices.name(7),
      virtual_devices.name(2),
    )
    ranks = replicas.inputs('float32', (131,), 4)
    value = replicas.on_devices(ranks, names)
    replicas.assert_equal(
      make_op().reduce(SUM, value, value), replicas.exact(ranks), names
    )


class PrecisionTest(tf.test.TestCase, parameterized.TestCase):
  """16-bit floats are added in float32, and a mean does not overflow on the way."""

  @parameterized.parameters('direct', 'naive', 'auto')
  def test_one_hop_adds_in_float32(self, name):
    make_op = replicas.OPS[name]
    ranks = [tf.constant([v], tf.bfloat16) for v in (256.0, 1.0, 1.0, 1.0)]
    pure = ranks[0]
    for other in ranks[1:]:
      pure = pure + other
    self.assertAllEqual(tf.cast(pure, tf.float32), [256.0])
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

  def test_integers_wrap_around(self):
    names = replicas.devices(2)
    value = replicas.on_devices(np.array([[200], [100]], np.uint8), names)
    result = cross_device.RingAllReduce().reduce(SUM, value, value)
    replicas.assert_equal(result, np.array([44], np.uint8), names)


class ComparisonTest(tf.test.TestCase):
  """The comparison of these tests rejects results that are nearly right."""

  def setUp(self):
    super().setUp()
    self.names = replicas.devices(4)
    self.ranks = replicas.inputs('float32', (97,), 4)
    self.expected = replicas.exact(self.ranks)

  def assert_rejected(self, values, names=None):
    value = replicas.on_devices(values, names or self.names)
    with self.assertRaises(AssertionError):
      replicas.assert_equal(value, self.expected, self.names)

  def test_right(self):
    value = replicas.on_devices([self.expected] * 4, self.names)
    replicas.assert_equal(value, self.expected, self.names)

  def test_wrong(self):
    self.assert_rejected(self.ranks)
    self.assert_rejected([self.expected] * 3 + [self.expected + 1])
    self.assert_rejected([np.roll(self.expected, 1)] * 4)
    self.assert_rejected([self.expected - self.ranks[1] + self.ranks[2]] * 4)
    self.assert_rejected([self.expected.astype(np.float64)] * 4)
    self.assert_rejected([self.expected] * 4, replicas.devices(5)[1:])


if __name__ == '__main__':
  tf.test.main()
