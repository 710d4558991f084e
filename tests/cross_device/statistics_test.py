"""Counters count what the graph did: executions, and planned bytes."""

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.collectives.simulator import simulate
from tests.cross_device import replicas
from tests.cross_device.replicas import SUM
from tf_strategies import cross_device
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.cross_device import statistics

virtual_devices.configure()

NAMES = replicas.devices(4)


def value_of(shape, world_size=4, dtype='float32'):
  return replicas.on_devices(
    replicas.inputs(dtype, shape, world_size), replicas.devices(world_size)
  )


class CallStatisticsTest(tf.test.TestCase):
  def test_adds_up(self):
    counted = statistics.CallStatistics()
    self.assertEqual((counted.calls, counted.bytes_in()), (0, {}))
    counted.record([virtual_devices.name(0), virtual_devices.name(1)], [8, 16])
    counted.record([virtual_devices.name(0), virtual_devices.name(1)], [1, 2])
    counted.record([virtual_devices.name(1)], [100])
    self.assertEqual(counted.calls, 3)
    self.assertEqual(
      counted.bytes_in(),
      {virtual_devices.name(0): 9, virtual_devices.name(1): 118},
    )

  def test_more_bytes_than_32_bits_count(self):
    counted = statistics.CallStatistics()
    counted.record([virtual_devices.name(0)], [3 << 32])
    counted.record([virtual_devices.name(0)], [3 << 32])
    self.assertEqual(counted.bytes_in(), {virtual_devices.name(0): 6 << 32})

  def test_executions_and_not_traces(self):
    counted = statistics.CallStatistics()

    @tf.function
    def step(times):
      for _ in tf.range(times):
        counted.record([virtual_devices.name(0)], [8])
      if times > 3:
        counted.record([virtual_devices.name(1)], [1])

    step(tf.constant(3))
    self.assertEqual(
      (counted.calls, counted.bytes_in()[virtual_devices.name(0)]), (3, 24)
    )
    step(tf.constant(0))
    self.assertEqual(counted.calls, 3)
    step(tf.constant(5))
    self.assertEqual(
      (counted.calls, counted.bytes_in()[virtual_devices.name(1)]), (9, 1)
    )

  def test_counter_made_in_a_scope_is_not_mirrored(self):
    strategy = tf.distribute.MirroredStrategy(
      [virtual_devices.name(1), virtual_devices.name(2)]
    )
    counted = statistics.CallStatistics()
    created = []

    def creator(next_creator, **kwargs):
      created.append(next_creator(**kwargs))
      return created[-1]

    @tf.function
    def step():
      counted.record([virtual_devices.name(0)], [8])

    with strategy.scope(), tf.variable_creator_scope(creator):
      step()
      step()
    (counter,) = counted._counters.values()
    self.assertNotIsInstance(counter, tf.distribute.DistributedValues)
    self.assertEndsWith(counter.device, virtual_devices.HOST)
    self.assertEmpty(created)
    self.assertEqual(counted.calls, 2)

  def test_a_session_counts_nothing(self):
    op = cross_device.RingAllReduce()
    names = replicas.devices(2)
    arrays = replicas.inputs('float32', (4,), 2)

    def reduce():
      value = replicas.on_devices(arrays, names)
      return op.reduce(SUM, value, value).values

    def in_a_session():
      with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for component in session.run(reduce()):
          self.assertAllEqual(component, replicas.exact(arrays))

    # One op in two graphs, and in a graph and eagerly, in either order.
    in_a_session()
    in_a_session()
    self.assertEqual(op.calls, 0)
    reduce()
    in_a_session()
    reduce()
    self.assertEqual(op.calls, 2)


class PlanTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(2, 4, 8)
  def test_ring_moves_the_least_that_it_can(self, world_size):
    op = cross_device.RingAllReduce()
    value = value_of((world_size * 3200,), world_size)
    for _ in range(3):
      op.reduce(SUM, value, value)
    least = 2 * (world_size - 1) * 3200 * 4
    self.assertEqual(op.last_plan.bytes_in, (least,) * world_size)
    self.assertEqual(op.last_plan.algorithm, 'ring')
    self.assertEqual(op.last_plan.num_bytes, world_size * 3200 * 4)
    self.assertEqual(
      list(op.report()['all_reduce_bytes_in'].values()),
      [3 * least] * world_size,
    )

  def test_ring_does_not_cut_what_is_small(self):
    op = cross_device.RingAllReduce()
    value = value_of((160,))
    op.reduce(SUM, value, value)
    # Whole, to the one that adds last and to all that are without the sum.
    self.assertEqual(sorted(op.last_plan.bytes_in), [640, 640, 1280, 1280])

  @parameterized.product(op=list(replicas.OPS), world_size=(2, 3, 4, 8))
  def test_equal_tensors_are_moved_as_the_schedule_says(self, op, world_size):
    op = replicas.OPS[op]()
    names = replicas.devices(world_size)
    schedule = op.schedule(names, 1)
    values = [value_of((40,), world_size)] * schedule.num_chunks
    op.batch_reduce(SUM, [(v, v) for v in values])
    expected = schedule.bytes_in([160] * schedule.num_chunks)
    self.assertEqual(op.last_plan.bytes_in, expected)
    self.assertEqual(op.last_plan.num_tensors, schedule.num_chunks)
    received = op.report()['all_reduce_bytes_in']
    self.assertEqual(tuple(received.values()), expected)

  def test_formulas(self):
    # Bytes into the busiest of 4 devices, of 4 tensors of B / 4 each.
    bytes_in = {
      'ring': 1.5,
      'direct': 1.5,
      'auto': 1.5,
      'halving_doubling': 1.5,
      'hierarchical': 1.5,
      'naive': 3,
      'tree': 2,
    }
    for name, factor in bytes_in.items():
      op = replicas.OPS[name]()
      values = [value_of((64,))] * 4
      op.batch_reduce(SUM, [(v, v) for v in values])
      self.assertEqual(max(op.last_plan.bytes_in), factor * 4 * 64 * 4, name)

  def test_a_large_tensor_is_cut_to_balance_small_ones(self):
    op = cross_device.RingAllReduce()
    values = [value_of((8192,)), value_of((320,)), value_of((64,), 4, 'int64')]
    op.batch_reduce(SUM, [(v, v) for v in values])
    total = 4 * 8192 + 4 * 320 + 8 * 64
    self.assertEqual(op.last_plan.num_bytes, total)
    # A piece ends at a multiple of 16 elements.
    self.assertLess(max(op.last_plan.bytes_in), 1.5 * total + 6 * 64)

  def test_direct_does_not_cut_what_shares_memory(self):
    if virtual_devices.KIND == 'GPU':
      self.skipTest('it cuts between the parts of a GPU')
    op = cross_device.ScheduledAllReduce('direct')
    value = value_of((8192,))
    op.reduce(SUM, value, value)
    total = 4 * 8192
    self.assertEqual(op.last_plan.bytes_in, (3 * total, *[total] * 3))

  def test_reduce_and_gather_count_what_comes_from_others(self):
    op = cross_device.RingAllReduce()
    value = value_of((100,))
    op.reduce(SUM, value, virtual_devices.name(0))
    op.reduce(SUM, value, virtual_devices.name(7))
    op._gather(value, value, 0)
    received = {k: s.bytes_in() for k, s in op._statistics.items()}
    by_device = {n[-5:]: b for n, b in received['reduce'].items()}
    self.assertEqual(
      by_device, {virtual_devices.name(0): 1200, virtual_devices.name(7): 1600}
    )
    self.assertEqual(set(received['gather'].values()), {1200})

  def test_nothing_before_the_first_call(self):
    op = cross_device.RingAllReduce()
    self.assertIsNone(op.last_plan)
    self.assertEqual(
      op.report(),
      {
        'cross_device_ops': 'RingAllReduce',
        'calls': {'all_reduce': 0, 'reduce': 0, 'gather': 0, 'broadcast': 0},
        'all_reduce_bytes_in': {},
        'reduce_bytes_in': {},
      },
    )

  @pytest.mark.smoke
  def test_calls_and_bytes_match_the_simulator(self):
    for name in ALGORITHMS:
      op = replicas.OPS[name]()
      schedule = op.schedule(NAMES, 1)
      ranks = replicas.inputs('float32', (64 * schedule.num_chunks,), 4)
      moved = simulate(schedule, ranks).bytes_per_link
      values = [value_of((64,))] * schedule.num_chunks
      op.batch_reduce(SUM, [(v, v) for v in values])
      self.assertEqual(sum(op.last_plan.bytes_in), sum(moved.values()), name)


if __name__ == '__main__':
  tf.test.main()
