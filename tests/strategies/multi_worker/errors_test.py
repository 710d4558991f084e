"""If workers disagree or end, all others raise typed errors."""

from absl.testing import absltest, parameterized

from tests import processes
from tests.strategies.multi_worker import failing_workers

_DEADLINE_SECONDS = 240


class ErrorsTest(parameterized.TestCase):
  """Two workers that start once for all tests."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.addresses = processes.addresses(7)
    cls.results = processes.run_workers(
      failing_workers.disagree,
      2,
      args=(cls.addresses,),
      deadline=_DEADLINE_SECONDS,
    )

  @parameterized.parameters(*failing_workers.COLLECTIVES)
  def test_collectives_that_do_not_match(self, name):
    for result in self.results:
      self.assertEqual(
        result[name]['kind'], 'CollectiveMismatchError', str(result)
      )
      self.assertEqual(result[name]['ranks'], [1])
    first, second = (r[name]['message'] for r in self.results)
    self.assertEqual(first, second)
    self.assertIn('rank 0 (task 0 at ', first)
    expected = {
      'shape': ('float32[3]', 'float32[4]'),
      'order': ('all_reduce(sum)', 'all_gather'),
      'loop': ('all_reduce(sum)', 'all_gather'),
    }
    for part in expected[name]:
      self.assertIn(part, first)

  @parameterized.parameters(
    ('devices', 'devices of a worker', '1', '2'),
    ('bucket_bytes', 'bucket_bytes', '1000', '1001'),
    ('shard_optimizer_state', 'shard_optimizer_state'),
  )
  def test_setups_that_do_not_match(self, name, *parts):
    for result in self.results:
      self.assertEqual(
        result[name]['kind'], 'CollectiveMismatchError', str(result)
      )
      self.assertEqual(result[name]['ranks'], [1])
      for part in ('set-up of MultiWorkerRingStrategy', *parts):
        self.assertIn(part, result[name]['message'])

  @parameterized.parameters(
    ('callback', 'ValueError'), ('early', 'nothing went wrong')
  )
  def test_worker_that_ends_early(self, name, kind):
    mine, ended = (result[name] for result in self.results)
    self.assertEqual(mine['kind'], 'WorkerUnavailableError', str(mine))
    self.assertEqual((mine['rank'], ended['kind']), (1, kind))
    self.assertIn('left the group', mine['message'])

  def test_algorithm_that_cannot_divide_optimizer_state(self):
    for result in self.results:
      self.assertEqual(result['tree']['kind'], 'UnsupportedOptionError')
      self.assertIn("'tree'", result['tree']['message'])

  def test_clusters_that_do_not_match(self):
    for result in self.results:
      self.assertIn(
        result['world_size']['kind'],
        ('ClusterConfigError', 'RendezvousError'),
        str(result),
      )

  def test_two_tasks_with_one_address(self):
    for result in self.results:
      self.assertEqual(result['one_address']['kind'], 'ClusterConfigError')
      self.assertIn(self.addresses[3], result['one_address']['message'])

  def test_missing_worker_is_named_at_the_deadline(self):
    for result in self.results:
      self.assertEqual(
        result['missing']['kind'], 'RendezvousError', str(result)
      )
      self.assertIn(
        f'task 2 at {self.addresses[2]}', result['missing']['message']
      )
      self.assertGreater(result['missing']['seconds'], 5.5)
      self.assertLess(result['missing']['seconds'], 60)

  def test_other_secret(self):
    for result in self.results:
      self.assertEqual(
        result['secret']['kind'], 'AuthenticationError', str(result)
      )
      self.assertIn('secret', result['secret']['message'])


if __name__ == '__main__':
  absltest.main()
