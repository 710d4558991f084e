"""Bounded staleness, and its count; when slots are free."""

import threading
import types
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from tests.strategies.parameter_server import fakes
from tf_strategies.strategies.parameter_server import engine as engine_lib
from tf_strategies.strategies.parameter_server import worker_pool

_STEP = engine_lib.Step(run=None, trains=True)


class _Part(worker_pool.Task):
  """A step on data of which each worker has its own part.

  Args:
    left: steps that each worker can still do; changed by this.
    done: gets who did it, in the order of beginning.
    engine: that counts.
  """

  steps = 1
  step = engine_lib.Step(run=None)
  outputs = None

  def __init__(self, left, done, engine):
    self._left = left
    self._done = done
    self._engine = engine

  def has_work_for(self, worker):
    return self._left[worker] > 0

  def may_begin(self, worker):
    return self._engine.may_begin(worker)

  def begin(self, worker):
    self._left[worker] -= 1
    self._done.append(worker)

  def run(self, worker):
    # Long enough for another worker to come in between, if it may.
    threading.Event().wait(0.01 if worker else 0.001)

  def finish(self, worker):
    self._engine.finished(self, worker)


class BoundedEngineTest(parameterized.TestCase):
  def _engine(self, num_workers, max_staleness):
    self.pool, _ = fakes.pool(self, num_workers, max_waiting=1)
    return engine_lib.BoundedEngine(
      self.pool, fakes.Recovery(), None, max_staleness=max_staleness
    )

  def _run(self, engine, parts):
    """Returns the worker that began each step; worker i has parts[i] steps."""
    left, done = list(parts), []
    for _ in range(sum(parts)):
      self.pool.submit(_Part(left, done, engine))
    engine.drain()
    return done

  def assert_bound(self, done, parts, bound):
    counts = [0] * len(parts)
    for worker in done:
      # Those that have all of their part behind them are not waited for.
      others = [c for c, part in zip(counts, parts, strict=True) if c < part]
      # The step of the slowest that runs has begun, so one more is counted.
      self.assertLessEqual(counts[worker] - min(others), bound + 1, done)
      counts[worker] += 1
    self.assertEqual(counts, list(parts))

  @parameterized.product(
    parts=[(3, 12), (12, 3), (0, 5), (4, 4), (1, 7, 4)], max_staleness=[0, 1, 3]
  )
  def test_parts_of_different_size(self, parts, max_staleness):
    engine = self._engine(len(parts), max_staleness)
    done = self._run(engine, parts)
    self.assert_bound(done, parts, max_staleness)

  @pytest.mark.smoke
  def test_a_worker_without_work_joins_where_the_slowest_is(self):
    engine = self._engine(2, 1)
    self._run(engine, (2, 30))
    # It has not 28 steps to make up for first.
    done = self._run(engine, (8, 8))
    self.assert_bound(done, (8, 8), 1)


class EngineTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    pool, _ = fakes.pool(self, 1)
    self.engine = engine_lib.Engine(pool, fakes.Recovery(), None)

  def _start(self, worker):
    self.engine.started(_STEP, worker)

  def _end(self, worker, steps=1):
    task = types.SimpleNamespace(step=_STEP, steps=steps, outputs=None)
    self.engine.finished(task, worker)

  def test_slots_are_in_use_until_they_were_applied(self):
    layout = types.SimpleNamespace(key='a layout', specs={})
    task = types.SimpleNamespace(
      slots=self.engine.take_slots(layout),
      attempt=self.engine._pool.attempt,
      function=types.SimpleNamespace(layout=layout),
    )
    meanwhile = []

    def apply(slots):
      self.assertEqual(slots, [task.slots])
      meanwhile.append(self.engine.take_slots(layout))
      return mock.Mock()

    self.engine.apply(apply, [task])
    self.assertNotEqual(meanwhile, [task.slots])
    self.assertIs(self.engine.take_slots(layout), task.slots)

  @pytest.mark.smoke
  def test_workers_in_turn_are_as_stale_as_there_are_others(self):
    for worker in range(3):
      self._start(worker)
    for _ in range(4):
      for worker in range(3):
        self._end(worker)
        self._start(worker)
    # The first three began together: 0, 1 and 2 were applied before them.
    self.assertEqual(self.engine.report()['staleness'], {0: 1, 1: 1, 2: 10})

  def test_a_slow_worker_is_as_stale_as_the_others_were_fast(self):
    self._start('slow')
    for _ in range(7):
      self._start('fast')
      self._end('fast')
    self._end('slow')
    # A task without data is no step.
    self._start('fast')
    self._end('fast', steps=0)
    report = self.engine.report()
    self.assertEqual(report['staleness'], {0: 7, 7: 1})
    self.assertEqual(report['steps'], 8)


if __name__ == '__main__':
  absltest.main()
