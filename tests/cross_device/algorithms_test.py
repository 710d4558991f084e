"""Every op is exact and keeps devices, for every dtype, shape and device count."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case, tiers, virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM
from tf_strategies import cross_device, errors

virtual_devices.configure()

# A scalar, no elements, a prime length, a matrix, a matrix without rows, and
# one large matrix, which ops that split tensors split.
SHAPES = ((), (0,), (97,), (6, 7), (0, 3), (61, 53))


class EveryOpTest(tf_case.TestCase):
  @tiers.product(
    op=list(replicas.OPS),
    world_size=(tiers.soak(2), 3, tiers.soak(4), tiers.soak(8)),
    reduce_op=(tiers.soak(SUM), MEAN),
  )
  def test_every_dtype_and_shape_in_one_call(self, op, world_size, reduce_op):
    op = replicas.OPS[op]()
    # The replicas are not in the order of the devices.
    names = replicas.devices(8)[: -world_size - 1 : -1]
    cases = [
      *itertools.product(replicas.DTYPES, SHAPES[:-1]),
      ('float32', SHAPES[-1]),
    ]
    arrays = [
      replicas.inputs(dtype, shape, world_size, reduce_op)
      for dtype, shape in cases
    ]
    strange = replicas.inputs('float32', (67,), world_size, reduce_op)
    strange[0][[5, 20, 40]] = np.nan, np.inf, np.inf
    strange[1][[20, 66]] = -np.inf
    arrays.append(strange)
    results = replicas.all_reduced(op, reduce_op, arrays, names)
    for ranks, result in zip(arrays, results, strict=True):
      replicas.assert_equal(result, replicas.exact(ranks, reduce_op), names)

  @tiers.product(op=list(replicas.OPS), world_size=(3, tiers.soak(8)))
  def test_replicas_are_equal_in_every_bit(self, op, world_size):
    names = replicas.devices(world_size)
    random = np.random.default_rng(0)
    ranks = random.normal(size=(world_size, 1009)).astype(np.float32)
    value = replicas.on_devices(ranks, names)
    for reduce_op in (SUM, MEAN):
      result = replicas.OPS[op]().reduce(reduce_op, value, value)
      first = result.values[0].numpy()
      replicas.assert_equal(result, first, names)
      self.assertAllClose(first, replicas.exact(ranks, reduce_op), 1e-5, 1e-5)

  @tiers.named_parameters(*tiers.few(replicas.NAMED_OPS, 'auto', 'ring'))
  def test_unknown_static_shapes(self, make_op):
    op, names = make_op(), replicas.devices(4)
    specs = [
      tf.TensorSpec([None, None]),
      tf.TensorSpec([5, None], tf.int64),
      tf.TensorSpec([13]),
      tf.TensorSpec(None, tf.bfloat16),
    ]

    @tf.function(input_signature=[[[spec] * 4 for spec in specs]])
    def step(values):
      reduced = replicas.all_reduced(op, SUM, values, names)
      for value, spec in zip(reduced, specs, strict=True):
        for component in value.values:
          component.shape.assert_is_compatible_with(spec.shape)
      return [r.values for r in reduced]

    for shapes in (
      [(6, 7), (5, 3), (13,), (2, 2, 3)],
      [(0, 7), (5, 0), (13,), ()],
      [(67, 61), (5, 211), (13,), (97,)],
    ):
      arrays = [
        replicas.inputs(spec.dtype.name, shape, 4)
        for spec, shape in zip(specs, shapes, strict=True)
      ]
      results = step(tf.nest.map_structure(tf.constant, arrays))
      for ranks, result in zip(arrays, results, strict=True):
        for component in result:
          np.testing.assert_array_equal(
            component.numpy(), replicas.exact(ranks), strict=True
          )
    self.assertEqual(op.calls, 3)

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_values_without_a_device(self, make_op):
    """Uses TensorFlow's strategy: arguments of a function have no device."""
    op, names = make_op(), replicas.devices(4)
    ranks = replicas.inputs('float32', (103,), 4)
    strategy = tf.distribute.MirroredStrategy(list(names), op)
    placed = []

    @tf.function
    def step(values):
      value = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
      )
      self.assertEqual({v.device for v in value.values}, {''})
      with strategy.scope():
        reduced = strategy.extended.batch_reduce_to(SUM, [(value, value)])[0]
      placed.extend(component.device for component in reduced.values)
      return reduced.values

    for component in step([tf.constant(rank) for rank in ranks]):
      self.assertAllEqual(component, replicas.exact(ranks))
    self.assertEqual([d.rpartition('device:')[2] for d in placed], list(names))
    self.assertNotIn('', op.report()['all_reduce_bytes_in'])

  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_bytes_received_equal_the_schedule(self, make_op):
    op, names = make_op(), replicas.devices(3)
    schedule = op.schedule(names, 1)
    value = replicas.on_devices(replicas.inputs('float32', (40,), 3), names)
    op.batch_reduce(SUM, [(value, value)] * schedule.num_chunks)
    received = op.report()['all_reduce_bytes_in']
    expected = schedule.bytes_in([160] * schedule.num_chunks)
    self.assertEqual(tuple(received.values()), expected)


class PrecisionTest(tf_case.TestCase):
  """16-bit floats are added in float32, and a mean does not overflow."""

  @parameterized.parameters('direct', 'naive', 'auto')
  def test_one_hop_adds_in_float32(self, name):
    make_op = replicas.OPS[name]
    # bfloat16 cannot represent 256 + 1: sums in bfloat16 would stay at 256.
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

  @parameterized.parameters('direct', 'naive')
  def test_large_sum_in_a_graph_is_deterministic(self, name):
    """TensorFlow must not reorder the additions of a sum by their arrival."""
    # Terms and sum exceed the memory that TensorFlow assumes for a logical CPU.
    size = 14_000_000
    op = replicas.OPS[name]()
    names = replicas.devices(3)
    ranks = []
    for rank, device in enumerate(names):
      with tf.device(device):
        noise = tf.random.stateless_normal([size], [rank, 0])
        ranks.append(tf.Variable(noise * 10.0**rank))

    @tf.function
    def step():
      value = replicas.on_devices(ranks, names)
      with tf.device(names[1]):
        return op.reduce(SUM, value, value).values[1] + 0.0

    expected = (ranks[0].numpy() + ranks[1].numpy()) + ranks[2].numpy()
    for _ in range(3):
      np.testing.assert_array_equal(step().numpy(), expected)


class RefusalTest(tf_case.TestCase):
  @parameterized.product(
    make_op=(cross_device.AutoAllReduce, cross_device.RingAllReduce),
    case=(
      (
        tf.TensorSpec([4, 2]),
        r'\(3, 2\).*replica 1 .*\(4, 2\).*Fix: .*strategy.gather',
      ),
      (tf.TensorSpec([3, 2], tf.float16), 'float32.*replica 1 .*float16'),
    ),
  )
  def test_mismatched_replicas_are_refused(self, make_op, case):
    spec, message = case
    names = replicas.devices(2)
    good = replicas.on_devices([tf.zeros([3, 2])] * 2, names)
    other = [tf.zeros([3, 2]), tf.zeros(spec.shape, spec.dtype)]
    value = replicas.on_devices(other, names)
    for destination in (value, virtual_devices.name(5)):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
        make_op().batch_reduce(SUM, [(good, good), (value, destination)])


if __name__ == '__main__':
  tf.test.main()
