"""If workers disagree, stop or die, all others raise typed errors."""

import signal
import tempfile
import time

from absl.testing import absltest, parameterized

from tests import processes
from tests.strategies.multi_worker import failing_workers

_DEADLINE_SECONDS = 240
# Generous because machines are shared. It must stay below the timeouts of
# heartbeats and collectives.
_AT_ONCE_SECONDS = 8.0


class DisagreementTest(parameterized.TestCase):
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
  )
  def test_setups_that_do_not_match(self, name, *parts):
    for result in self.results:
      self.assertEqual(
        result[name]['kind'], 'CollectiveMismatchError', str(result)
      )
      self.assertEqual(result[name]['ranks'], [1])
      for part in ('set-up of MultiWorkerRingStrategy', *parts):
        self.assertIn(part, result[name]['message'])

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


class LossTest(parameterized.TestCase):
  """Three workers that lose one after the other in the middle of `fit`."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.lost_at = {}
    temporary = tempfile.TemporaryDirectory()
    cls.addClassCleanup(temporary.cleanup)
    directory = temporary.name
    cls.notes = failing_workers.Losses(directory, None)
    with processes.Workers(
      failing_workers.lose, 3, args=(directory,), deadline=_DEADLINE_SECONDS
    ) as workers:
      cls.addresses = workers.addresses
      for name, victim, act, _ in failing_workers.JOBS:
        for rank in range(3):
          cls.notes.read(name, rank, 'runs')
        if act is None:
          cls._lose(workers, name, victim)
      outcomes = workers.wait()
    for outcome in outcomes:
      assert outcome.exitcode == 0 and not outcome.error_text, outcome

  @classmethod
  def _lose(cls, workers, name, victim):
    """Kills or stops a worker, and restarts it when the others have noticed."""
    is_stop = name == 'stop'
    workers.signal(victim, signal.SIGSTOP if is_stop else signal.SIGKILL)
    cls.lost_at[name] = time.time()
    for rank in range(3):
      if rank != victim:
        cls.notes.read(name, rank, 'told')
    workers.kill(victim)
    with open(cls.notes.path(name, victim, 'gone'), 'w'):
      pass
    workers.start(victim)

  def assert_survivors(self, name, victim):
    """Checks that `fit` raised on every other worker, and returns their notes."""
    told = [
      self.notes.read(name, rank, 'told', 1)
      for rank in range(3)
      if rank != victim
    ]
    for result in told:
      self.assertEqual(result['kind'], 'WorkerUnavailableError', str(result))
      self.assertEqual(result['rank'], victim)
      self.assertEqual(result['address'], self.addresses[victim])
      self.assertIn(
        f'ank {victim} (task {victim} at {self.addresses[victim]})',
        result['message'],
      )
    return told

  @parameterized.parameters(0, 1)
  def test_killed_worker_is_named_at_once(self, victim):
    name = f'kill_{victim}'
    for result in self.assert_survivors(name, victim):
      self.assertLess(result['at'] - self.lost_at[name], _AT_ONCE_SECONDS)

  def test_stopped_worker_is_named_after_the_silence(self):
    for result in self.assert_survivors('stop', 1):
      self.assertIn('silent', result['message'])
      self.assertGreater(result['at'] - self.lost_at['stop'], 2.5)
      self.assertLess(result['at'] - self.lost_at['stop'], 30)

  def test_exception_of_a_callback_ends_the_others_too(self):
    self.assert_survivors('callback', 0)
    result = self.notes.read('callback', 0, 'told', 1)
    self.assertEqual(result['kind'], 'ValueError')
    self.assertIn('the disk of this callback is full', result['message'])

  def test_worker_that_finishes_early(self):
    for result in self.assert_survivors('early', 2):
      self.assertIn('left the group', result['message'])
    self.assertEqual(
      self.notes.read('early', 2, 'told', 1)['kind'], 'fit ended'
    )


if __name__ == '__main__':
  absltest.main()
