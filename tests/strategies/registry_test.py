"""`create_strategy` rejects every wrong option, with and without a cluster."""

import json
import os
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies.cluster import workers
from tf_strategies.launch import ports as ports_lib

virtual_devices.configure()


def _config(task_type, **counts):
  """Returns the TF_CONFIG of the last task of a type."""
  cluster = {
    job: [f'{job}{i}:1' for i in range(n)] for job, n in counts.items()
  }
  task = {'type': task_type, 'index': counts.get(task_type, 1) - 1}
  return json.dumps({'cluster': cluster, 'task': task})


class RegistryTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ))
    os.environ.pop('TF_CONFIG', None)
    self.enter_context(mock.patch.object(workers, '_has_joined', False))

  @parameterized.parameters(
    ('mirrored_ring', {}, "Fix: write 'ring_mirrored'"),
    ('parameter_server', {'mode': 'asynch'}, "mode='asynch'.*'async'"),
    (
      'parameter_server',
      {'bakup_workers': 1},
      "'bakup_workers'.*write 'backup_workers'",
    ),
    (
      'ring_mirrored',
      {'device': []},
      "the option 'device' of .*ring_mirrored.* Fix: write 'devices'",
    ),
    (
      'one_device',
      {'mode': 'sync'},
      "one of 'devices'.*'mode' of strategy='one_device'.* Fix: leave it out",
    ),
    (
      'multi_worker_ring',
      {'compresion': 'bfloat16'},
      r'Fix: write options=RingOptions\(compression=\.\.\.\)',
    ),
    (
      'central_storage',
      {'devices': ['CPU:0'], 'compute_devices': ['CPU:1']},
      r"devices=\['CPU:0'\] beside compute_devices.*leave one out",
    ),
  )
  def test_invalid_option_is_refused(self, name, options, message):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      tfs.create_strategy(name, **options)

  @parameterized.product(
    make=(
      lambda: tfs.create_strategy('one_device'),
      tfs.RingMirroredStrategy,
      tfs.CentralStorageStrategy,
    ),
    job=(
      ({'TF_CONFIG': _config('worker', chief=1, worker=2)}, '_worker_ring'),
      (
        {'TF_CONFIG': _config('chief', chief=1, worker=2, ps=1)},
        "create_strategy.'parameter_server'",
      ),
      ({'PMI_SIZE': '2'}, 'MPI.*create_strategy.*multi_worker_ring'),
    ),
  )
  def test_local_strategy_in_a_cluster_is_refused(self, make, job):
    environ, message = job
    os.environ.update(environ)
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      make()

  @parameterized.parameters(
    {'TF_CONFIG': _config('evaluator', chief=1, worker=2)},
    {'TF_CONFIG': _config('evaluator', chief=1, worker=2, ps=1)},
    {'TF_CONFIG': _config('worker', worker=1)},
    {'TF_CONFIG': '{}', 'PMI_SIZE': '2'},
  )
  def test_local_strategy_of_an_independent_task(self, **environ):
    os.environ.update(environ)
    for name in ('one_device', 'mirrored', 'ring_mirrored', 'central_storage'):
      self.assertIsInstance(tfs.create_strategy(name), tf.distribute.Strategy)

  def test_local_strategy_after_a_multi_worker_strategy(self):
    tfs.create_strategy('multi_worker_ring').close()
    os.environ['TF_CONFIG'] = _config('worker', worker=2)
    strategy = tfs.create_strategy('ring_mirrored')
    self.assertIsInstance(strategy, tfs.RingMirroredStrategy)

  def test_second_strategy_at_the_same_address_is_refused(self):
    address = f'127.0.0.1:{ports_lib.pick_ports(1)[0]}'
    options = {
      'cluster': tfs.cluster.ClusterConfig({'worker': [address]}, 'worker', 0)
    }
    first = tfs.create_strategy('multi_worker_ring', **options)
    with self.assertRaisesRegex(
      tfs.errors.RendezvousError, r'This process listens there.*Fix: close\(\)'
    ):
      tfs.create_strategy('multi_worker_ring', **options)
    self.assertEqual(first.reduce('SUM', tf.constant(3.0), axis=None), 3.0)
    first.close()
    tfs.create_strategy('multi_worker_ring', **options).close()

  def test_parameter_server_options_without_cluster_give_one_device(self):
    strategy = tfs.create_strategy(
      'parameter_server',
      mode='sync',
      backup_workers=1,
      variable_partitioner=lambda shape, dtype: [1],
      checkpoint_dir='somewhere',
    )
    self.assertIsInstance(strategy, tf.distribute.OneDeviceStrategy)


if __name__ == '__main__':
  tf.test.main()
