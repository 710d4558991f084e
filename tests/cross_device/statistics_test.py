"""Counters report the executions of the graph, and the planned bytes."""

import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import SUM
from tf_strategies import cross_device
from tf_strategies.cross_device import statistics

virtual_devices.configure()


def value_of(shape, world_size=4):
  return replicas.on_devices(
    replicas.inputs('float32', shape, world_size), replicas.devices(world_size)
  )


class CallStatisticsTest(tf.test.TestCase):
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


class PlanTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(*replicas.NAMED_OPS)
  def test_equal_tensors_are_moved_as_the_schedule_says(self, make_op):
    op, world_size = make_op(), 3
    names = replicas.devices(world_size)
    schedule = op.schedule(names, 1)
    values = [value_of((40,), world_size)] * schedule.num_chunks
    op.batch_reduce(SUM, [(v, v) for v in values])
    expected = schedule.bytes_in([160] * schedule.num_chunks)
    self.assertEqual(op.last_bytes_in, expected)
    received = op.report()['all_reduce_bytes_in']
    self.assertEqual(tuple(received.values()), expected)

  def test_reduce_counts_what_comes_from_others(self):
    op = cross_device.RingAllReduce()
    value = value_of((100,))
    op.reduce(SUM, value, virtual_devices.name(0))
    op.reduce(SUM, value, virtual_devices.name(7))
    received = {k: s.bytes_in() for k, s in op._statistics.items()}
    by_device = {n[-5:]: b for n, b in received['reduce'].items()}
    self.assertEqual(
      by_device, {virtual_devices.name(0): 1200, virtual_devices.name(7): 1600}
    )


if __name__ == '__main__':
  tf.test.main()
