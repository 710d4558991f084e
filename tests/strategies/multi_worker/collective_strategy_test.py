"""Uses NCCL where possible, and otherwise raises an error at once."""

import socket
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import nccl, processes, tf_case, tiers, virtual_devices
from tests.cross_device import fake_gpus
from tf_strategies import _tf_internal
from tf_strategies.cross_device import links
from tf_strategies.strategies.multi_worker import collective_strategy

virtual_devices.configure()

_LINK = 'nccl' if nccl.IS_GPU else 'ring'


def _start_with_port_in_use(rank):
  """Returns whether the error names an address at which another socket listens."""
  addresses = processes.addresses(2)
  cluster = tfs.cluster.ClusterConfig({'worker': addresses}, 'worker', rank)
  host, _, port = addresses[rank].rpartition(':')
  with socket.create_server((host, int(port))):
    try:
      tfs.MultiWorkerCollectiveStrategy(cluster)
    except tfs.errors.RendezvousError as e:
      return f'for worker 0, got {addresses[0]}' in str(e)


class CommunicationTest(tf_case.TestCase):
  @parameterized.named_parameters(
    ('whole_gpus', 'auto', (1, 1), 'nccl'),
    ('virtual_gpus', 'auto', (2,), 'ring'),
    ('ring_requested', 'ring', (1, 1), 'ring'),
  )
  def test_communication_is_chosen_by_device(self, asked, parts, expected):
    options = tfs.CollectiveOptions(communication=asked)
    with fake_gpus.machine(*parts):
      found = collective_strategy._communication(options, fake_gpus.names(2))
    self.assertEqual(found, expected)

  def test_invalid_communication_is_refused_before_waiting(self):
    addresses = processes.addresses(2)
    cluster = tfs.cluster.ClusterConfig({'worker': addresses}, 'worker', 0)
    with (
      fake_gpus.machine(2),
      self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, "'nccl'.*1 physical.*'auto'"
      ),
    ):
      tfs.MultiWorkerCollectiveStrategy(
        cluster, tfs.CollectiveOptions(communication='nccl')
      )

  def test_port_in_use_is_named(self):
    [is_named] = processes.run_workers(_start_with_port_in_use, 1)
    self.assertTrue(is_named)


class CompiledLoopTest(tf_case.TestCase):
  """A step of a custom loop that XLA compiles, on devices that stand for GPUs.

  Here TensorFlow runs an all-reduce on each replica, together with the worker's
  other replicas.
  """

  def trace(self, workers, is_whole=True):
    strategy = tfs.MultiWorkerCollectiveStrategy(
      devices=virtual_devices.names(2)
    )
    strategy.extended.communicator.world_size = workers

    def reduce():
      context = tf.distribute.get_replica_context()
      return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([2]))

    @tf.function(jit_compile=True)
    def step():
      return strategy.run(reduce)

    with (
      mock.patch.object(
        _tf_internal.MirroredExtended,
        '_use_merge_call',
        lambda extended: not _tf_internal.in_xla_context(),
      ),
      mock.patch.object(links, 'nccl_is_usable', return_value=is_whole),
    ):
      return step.get_concrete_function().graph

  def test_one_worker_uses_all_reduce_of_tensorflow(self):
    graph = self.trace(workers=1)
    types = [operation.type for operation in graph.get_operations()]
    self.assertEqual(types.count('CollectiveReduceV2'), 2)

  def test_virtual_gpus_are_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'whole GPUs .*jit_compile=True'
    ):
      self.trace(workers=1, is_whole=False)

  def test_several_workers_are_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'between workers.*jit_compile=False'
    ):
      self.trace(workers=2)


class OneWorkerTest(tf_case.TestCase):
  """One worker on a whole GPU, if there is one."""

  @tiers.named_parameters(('auto', 'auto'), tiers.soak('by_name', _LINK))
  def test_all_reduce_runs_on_the_device(self, communication):
    [(found, report, sums)] = processes.run_workers(
      nccl.collective, 1, args=(communication,)
    )
    self.assertAllEqual(sums[0], [1.0, 2.0])
    self.assertAllEqual(sums[1], [3])
    self.assertEqual(report['link'], f'tensorflow/{_LINK}')
    devices = [device for kind, device in found if kind == 'CollectiveReduceV2']
    self.assertLen(devices, 2)
    for device in devices:
      self.assertIn(virtual_devices.name(0).lower(), device)

  @parameterized.parameters(False, True)
  @pytest.mark.soak
  def test_fit_equals_one_device(self, jit_compile):
    [(difference, moved, report)] = processes.run_workers(
      nccl.fit, 1, args=(jit_compile,)
    )
    self.assertLessEqual(difference, 1e-6)
    self.assertGreater(moved, 0.01)
    self.assertEqual(report['calls'].get('all_reduce', 0), 0)


if __name__ == '__main__':
  tf.test.main()
