"""If a worker misses a call that the others make, the message contains the fix."""

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
    'evaluate_then_fit',
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
  def test_mistake_is_explained(self, mistake, message):
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
    output = done.stdout + done.stderr
    self.assertEqual(done.returncode, 1, output)
    self.assertIn(message, output)
    self.assertNotIn('concurrent/futures', output)
    if mistake == 'crash':
      # The message must not report a program that failed as one that ended
      # normally.
      self.assertNotIn('has ended', output)
      self.assertIn('worker 1 failed first', output)
      # The traceback of the failed worker comes before the resulting errors.
      self.assertNotIn('[worker 0] Traceback', output.partition(message)[0])
    elif _ENDED in message:
      self.assertIn('[worker 1] has ended', output)


if __name__ == '__main__':
  absltest.main()
