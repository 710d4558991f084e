"""The choice: by kind of device, by size, and never a loss to any other."""

from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tf_strategies import collectives, cross_device
from tf_strategies.collectives import cost_model
from tf_strategies.cross_device import auto, executor

virtual_devices.configure()

BANDWIDTH = ('ring', 'direct', 'halving_doubling')


def gpus(count):
  return [
    f'/job:localhost/replica:0/task:0/device:GPU:{i}' for i in range(count)
  ]


class ChooseScheduleTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(world_size=(1, 2, 3, 8), num_bytes=(0, 4, 10**9))
  def test_direct_on_cpus(self, world_size, num_bytes):
    schedule = auto.AutoAllReduce().schedule(
      replicas.devices(world_size), num_bytes
    )
    self.assertEqual(schedule.name, 'direct')
    self.assertEqual(schedule.world_size, world_size)
    schedule.validate()

  @parameterized.product(world_size=(4, 8, 16), num_bytes=(10**8, 10**9))
  def test_bandwidth_on_gpus_with_many_bytes(self, world_size, num_bytes):
    schedule = auto.AutoAllReduce().schedule(gpus(world_size), num_bytes)
    self.assertIn(schedule.name, BANDWIDTH)
    chunk_bytes = collectives.chunk_sizes(num_bytes, schedule.num_chunks)
    least = 2 * (world_size - 1) * num_bytes / world_size
    self.assertAllClose(max(schedule.bytes_in(chunk_bytes)), least, rtol=1e-6)

  @parameterized.product(world_size=(4, 8, 16), num_bytes=(0, 4, 100))
  def test_few_rounds_on_gpus_with_few_bytes(self, world_size, num_bytes):
    schedule = auto.AutoAllReduce().schedule(gpus(world_size), num_bytes)
    ring = collectives.ring_all_reduce(world_size)
    self.assertLess(schedule.num_rounds, ring.num_rounds)

  @parameterized.parameters(2, 3, 4, 6, 8)
  def test_no_other_candidate_would_be_cheaper(self, world_size):
    topology = collectives.Topology(world_size, auto._GPU_LINK)
    for num_bytes in (4, 10**4, 10**6, 10**8):
      chosen = auto.AutoAllReduce().schedule(gpus(world_size), num_bytes)
      cheapest = min(
        collectives.cost(
          collectives.ALGORITHMS[name](world_size), num_bytes, topology
        )
        for name in cost_model.CANDIDATES
      )
      self.assertLessEqual(
        collectives.cost(chosen, num_bytes, topology), cheapest * 1.001
      )

  def test_one_gpu(self):
    schedule = auto.AutoAllReduce().schedule(gpus(1), 10**6)
    self.assertEqual((schedule.world_size, schedule.transfers), (1, ()))

  def test_mixed_devices_have_links(self):
    mixed = [*gpus(3), virtual_devices.name(0)]
    self.assertFalse(executor.share_memory(mixed))
    self.assertEqual(auto.AutoAllReduce().schedule(mixed, 10**8).world_size, 4)

  def test_tensors_are_cut_between_gpus_only(self):
    for make_op in (cross_device.AutoAllReduce, cross_device.DirectAllReduce):
      self.assertIsNone(make_op().split_above(replicas.devices(4)))
      self.assertEqual(make_op().split_above(gpus(4)), 1 / 8)

  def test_device_without_a_name_is_a_cpu_where_there_is_nothing_else(self):
    self.assertTrue(executor.share_memory(['', virtual_devices.name(1)]))
    self.assertFalse(executor.share_memory(['', gpus(1)[0]]))


class NcclIsUsableTest(tf.test.TestCase):
  def test_not_on_cpus(self):
    self.assertFalse(auto.nccl_is_usable(replicas.devices(4)))
    self.assertFalse(auto.nccl_is_usable([*gpus(1), virtual_devices.name(0)]))

  def test_not_where_a_physical_gpu_is_shared(self):
    def list_devices(count):
      return lambda device_type=None: [device_type] * count

    for logical, expected in ((4, False), (2, True)):
      with (
        mock.patch.object(tf.config, 'list_physical_devices', list_devices(2)),
        mock.patch.object(
          tf.config, 'list_logical_devices', list_devices(logical)
        ),
      ):
        self.assertEqual(auto.nccl_is_usable(gpus(2)), expected)

  def test_graphs_on_such_gpus_are_handed_to_tensorflow(self):
    # ReductionToOneDevice stands in for NCCL, and CPUs for GPUs.
    op = auto.AutoAllReduce()
    op._nccl = tf.distribute.ReductionToOneDevice()
    devices = replicas.devices(4)
    ranks = replicas.inputs('float32', (8,), 4)
    value = replicas.on_devices(ranks, devices)

    def all_reduce():
      [reduced] = op.batch_reduce(replicas.SUM, [(value, value)])
      return reduced.values

    with (
      mock.patch.object(auto, 'nccl_is_usable', return_value=True),
      mock.patch.object(
        op._nccl, 'batch_reduce', wraps=op._nccl.batch_reduce
      ) as handed_over,
    ):
      graph = tf.function(all_reduce)
      for result in graph(), graph():
        for copy in result:
          self.assertAllEqual(copy, replicas.exact(ranks))
      handed_over.assert_called_once()
      all_reduce()  # NCCL needs a graph.
      handed_over.assert_called_once()
    self.assertEqual(op.calls, 3)
    # Twice by the ring's formula, once by the direct schedule of one tensor.
    self.assertEqual(max(op.report()['all_reduce_bytes_in'].values()), 192)


if __name__ == '__main__':
  tf.test.main()
