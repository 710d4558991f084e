"""Processes take turns. One that fails or hangs loses only its own row."""

import time

from absl.testing import absltest, parameterized

from benchmarks import worker_pool
from benchmarks.input_pipeline import rounds

_DEADLINE_S = 60.0


def _run(hows, deadline_s=_DEADLINE_S, train_step_s=0.0):
  def start(how):
    pool = worker_pool.WorkerPool(
      how,
      'tests.benchmarks.input_pipeline.fake_actor:Actor',
      [()],
      deadline_seconds=deadline_s,
    )
    pool.send('open', variant=how, spec={})
    return pool

  return rounds.run(hows, start, 3, train_step_s)


class RoundsTest(parameterized.TestCase):
  def test_every_round_is_counted(self):
    (row,) = _run(['works'], train_step_s=0.1)
    self.assertEqual(row.error, '')
    self.assertEqual(row.rates, [100.0] * 3)
    self.assertEqual(row.first_batch_ms, [100.0] * 3)
    self.assertEqual(row.prep_ms, [100.0] * 3)
    self.assertEqual(row.step_ms, [100.0] * 3)
    self.assertEqual(row.record()['items_per_s'], 100.0)
    self.assertRegex(rounds.table([row]), r'\| works +\| +100 \| .* 100\.00 \|')

  @parameterized.parameters(
    ('raises', 'ValueError: no'),
    ('empty', 'yields no batch'),
  )
  def test_failure_is_told_in_its_row(self, how, words):
    good, bad = _run(['works', how])
    self.assertLen(good.rates, 3)
    self.assertEmpty(good.error)
    self.assertRegex(bad.error.replace('\n', ' '), words)
    self.assertIn('failed', rounds.table([good, bad]))

  def test_hang_ends_at_the_deadline(self):
    start = time.monotonic()
    good, bad = _run(['works', 'hangs'], deadline_s=5.0)
    self.assertLess(time.monotonic() - start, _DEADLINE_S)
    self.assertLen(good.rates, 3)
    self.assertIn('did not answer within 5 s', bad.error)


if __name__ == '__main__':
  absltest.main()
