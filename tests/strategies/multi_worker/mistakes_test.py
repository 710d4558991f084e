"""If workers wait for one that does not come, the message says what to change."""

import sys

from absl.testing import absltest, parameterized

from benchmarks import processes
from tests import tiers

_ENDED = "rank 1's program has ended"

# Each mistake, and the message for the first worker.
_MISTAKES = (
  (
    'evaluate',
    f'{_ENDED} without calling evaluate. Fix: call it on all workers.',
  ),
  tiers.soak('fit', f'{_ENDED} while others are in fit. Fix: call it equally'),
  tiers.soak('rows', 'Fix: pass every worker the whole arrays'),
  tiers.soak(
    'goes_on',
    'rank 0 in evaluate, rank 1 in the begin of fit. Fix: call the same',
  ),
  tiers.soak('rate', 'rank 0 has 0.5, rank 1 has 0.00999'),
  (
    'own_train_function',
    "SGD.apply inside the strategy's step, got a call outside",
  ),
  tiers.soak('crash', 'ValueError: the disk of this worker is full'),
)


class MistakesTest(parameterized.TestCase):
  @tiers.parameters(*_MISTAKES)
  def test_message(self, mistake, message):
    done = processes.run_python(
      *('-m', 'tf_strategies.launch', '--num_workers=2', '--'),
      *(
        sys.executable,
        '-m',
        'tests.strategies.multi_worker.mistakes',
        mistake,
      ),
      deadline_seconds=240,
    )
    said = done.stdout + done.stderr
    self.assertEqual(done.returncode, 1, said)
    self.assertIn(message, said)
    self.assertNotIn('concurrent/futures', said)
    if mistake == 'crash':
      # The message must not report a program that failed as one that ended
      # normally.
      self.assertNotIn('has ended', said)
      self.assertIn('worker 1 failed first', said)
      # The traceback of the failed worker comes before the resulting errors.
      before = said.partition(message)[0]
      self.assertNotIn('[worker 0] Traceback', before)
    elif _ENDED in message:
      self.assertIn('[worker 1] has ended', said)


if __name__ == '__main__':
  absltest.main()
