"""Staleness counts the steps that were applied while one was computed."""

import pytest
from absl.testing import absltest

from tf_strategies.strategies.parameter_server import engine


class StalenessTest(absltest.TestCase):
  @pytest.mark.smoke
  def test_workers_in_turn_are_as_stale_as_there_are_others(self):
    staleness = engine.Staleness()
    for worker in range(3):
      staleness.start(worker)
    for _ in range(4):
      for worker in range(3):
        staleness.end(worker)
        staleness.start(worker)
    # The first three began together: 0, 1 and 2 were applied before them.
    self.assertEqual(staleness.histogram, {0: 1, 1: 1, 2: 10})

  def test_a_slow_worker_is_as_stale_as_the_others_were_fast(self):
    staleness = engine.Staleness()
    staleness.start('slow')
    for _ in range(7):
      staleness.start('fast')
      staleness.end('fast')
    staleness.end('slow')
    self.assertEqual(staleness.histogram, {0: 7, 7: 1})


if __name__ == '__main__':
  absltest.main()
