"""Any number of workers and any algorithm give the same bits."""

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.strategies import reproducible_program
from tf_strategies import errors

virtual_devices.configure()
pytestmark = [
  pytest.mark.skipif(
    not virtual_devices.IS_DETERMINISTIC,
    reason='on GPUs set TF_DETERMINISTIC_OPS=1',
  ),
]

_SHARDS = 8
_DEADLINE_SECONDS = 280


def _train(count, algorithm, num_devices=1, **arguments):
  """Returns the digests of all workers, and the calls of one."""
  options = {
    'all_reduce': algorithm,
    'reproducible': _SHARDS,
    # Several buckets, so that communication overlaps with the backward pass.
    'bucket_bytes': 1 << 14,
  }
  results = processes.run_workers(
    reproducible_program.train_as_worker,
    count,
    args=(options, num_devices),
    deadline=_DEADLINE_SECONDS,
    **arguments,
  )
  return {found for found, _ in results}, results[0][1]


class ReproducibleWorkersTest(tf.test.TestCase, parameterized.TestCase):
  _in_one_process = None

  def want(self):
    """Returns the digests of one process without communication."""
    kind = type(self)
    if kind._in_one_process is None:
      strategy = tfs.RingMirroredStrategy(
        virtual_devices.names(1), reproducible=_SHARDS
      )
      kind._in_one_process = reproducible_program.digests(
        reproducible_program.fit(strategy)
      )
    return kind._in_one_process

  @tiers.named_parameters(
    ('3_workers_in_a_ring', 3, 'ring', 1),
    tiers.soak('2_workers_of_2_devices', 2, 'tree', 2),
    tiers.soak('3_workers_on_a_tree', 3, 'tree', 1),
    tiers.soak('4_workers', 4, 'halving_doubling', 1),
    tiers.soak('7_workers', 7, 'ring', 1),
  )
  def test_same_bits(self, count, algorithm, num_devices):
    found, calls = _train(count, algorithm, num_devices)
    self.assertEqual(found, {self.want()})
    # Checks that the workers really exchanged exponents and integers.
    self.assertGreater(calls['all_reduce'], 10)

  @pytest.mark.soak
  def test_other_order_of_plain_sums_is_found(self):
    found = set()
    for count in (1, 3):
      options = {'reproducible': _SHARDS, 'all_reduce': 'ring'}
      results = processes.run_workers(
        reproducible_program.train_as_worker,
        count,
        args=(options, 1, reproducible_program.add_plain_floats),
        deadline=_DEADLINE_SECONDS,
      )
      found |= {digests for digests, _ in results}
    self.assertLen(found, 2)


def _create(rank, reproducible, threads):
  tf.config.threading.set_intra_op_parallelism_threads(threads[rank])
  options = tfs.RingOptions(reproducible=reproducible)
  devices = virtual_devices.names(1)
  tfs.MultiWorkerRingStrategy(options=options, devices=devices).close()


class DisagreementTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('number_of_threads', True, (1, 2), 'threads of an operation'),
    ('fewer_shards_than_workers', 1, (1, 1), 'reproducible=1 with 2'),
  )
  def test_refused(self, reproducible, threads, message):
    with processes.Workers(_create, 2, args=(reproducible, threads)) as workers:
      outcomes = workers.wait()
    for outcome in outcomes:
      self.assertIsInstance(
        outcome.error,
        errors.CollectiveMismatchError | errors.UnsupportedOptionError,
      )
      self.assertIn(message, str(outcome.error))


if __name__ == '__main__':
  tf.test.main()
