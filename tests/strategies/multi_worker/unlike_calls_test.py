"""If calls would train for different times, workers raise when the call begins."""

from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.strategies.multi_worker import unlike_calls

# Name: (end of the argument that differs, values of the ranks).
_TOLD = {
  'epochs': ('epochs', 2, 3),
  'steps_per_epoch': ('steps_per_epoch (or the number of batches)', 4, 6),
  'rows': ('steps_per_epoch (or the number of batches)', 8, 6),
  'own_data': ('steps_per_epoch (or the number of batches)', 2, 3),
  'validation_steps': ('validation_steps', 1, 3),
  'validation_freq': ('validation_freq', 1, 2),
  'validation_data': ('validation_data (given or not)', 'False', 'True'),
  'run_eagerly': ('run_eagerly', 'False', 'True'),
  'evaluate': ('or the number of batches)', 1, 3),
  'predict': ('or the number of batches)', 1, 3),
}


class UnlikeCallsTest(parameterized.TestCase):
  @tiers.parameters('multi_worker_ring', tiers.soak('multi_worker_collective'))
  def test_every_worker_is_told_at_once(self, kind):
    results = processes.run_workers(
      unlike_calls.call_all, 2, args=(kind, tuple(_TOLD)), deadline=240
    )
    for name, (what, first, second) in _TOLD.items():
      for told, seconds in (result[name] for result in results):
        with self.subTest(name):
          self.assertIn(
            f'{what} to be the same on all workers: rank 0 has {first}, rank 1 has '
            f'{second}. Fix: ',
            told,
          )
          self.assertLess(seconds, 30)


if __name__ == '__main__':
  absltest.main()
