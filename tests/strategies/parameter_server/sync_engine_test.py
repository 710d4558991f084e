"""Synchronous steps end, whichever of their microbatches is lost or late."""

import threading
import types

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tests.strategies.parameter_server import fakes
from tf_strategies.strategies.parameter_server import (
  batch_message,
  step_task,
  sync_engine,
  worker_function,
  worker_pool,
)

_DEADLINE_SECONDS = 20.0
_STEP = step_task.Step(run=None, optimizers=('an optimizer',))


class _Engine(sync_engine.SyncEngine):
  """Calls a function of the test for each microbatch; applies nothing."""

  compute = None

  def microbatch_function(self, step, layout):
    def function(worker, message, slots):
      self.compute(worker)

    function.layout = types.SimpleNamespace(key='', specs={})
    return function, worker_function.Discovery(None, ())

  def _discover(self, step, structure):
    return worker_function.Discovery(None, ())

  def _apply_function(self, step, chosen):
    return lambda slots: tf.zeros([0], tf.float64)


class SyncEngineTest(parameterized.TestCase):
  def _engine(self, num_workers, backup_workers):
    self.liveness = fakes.Liveness()
    self.pool = worker_pool.WorkerPool(
      range(num_workers),
      self.liveness,
      max_waiting=2 * num_workers,
      timeout_seconds=_DEADLINE_SECONDS,
    )
    self.addCleanup(self.pool.close)
    return _Engine(
      self.pool,
      None,
      fakes.Recovery(),
      backup_workers=backup_workers,
      in_replica=None,
    )

  def _train(self, engine, steps):
    batch = batch_message.Batch(np.arange(12, dtype=np.float32))
    engine.train(_STEP, [batch] * steps)

  @parameterized.parameters(False, True)
  def test_late_microbatch_of_a_lost_worker(self, returns):
    """It goes back to the queue of a step that has all it needs."""
    engine = self._engine(3, backup_workers=1)
    self.liveness.is_complete = lambda: returns
    is_taken, is_over = threading.Event(), threading.Event()

    def compute(worker):
      if worker != 2 or is_over.is_set():
        is_taken.wait(_DEADLINE_SECONDS)
        return
      is_taken.set()
      is_over.wait(_DEADLINE_SECONDS)
      self.liveness.dead_workers.add(2)
      raise tf.errors.UnavailableError(None, None, 'the worker is gone')

    engine.compute = compute
    self._train(engine, 1)
    self.assertTrue(is_taken.is_set())
    is_over.set()
    self._train(engine, 5)
    engine.drain()
    self.assertEqual(engine.report()['steps'], 6)
    self.assertEqual(engine.report()['dropped'], 6)

  @parameterized.parameters((2, 0), (3, 0), (3, 1), (4, 2))
  def test_worker_that_never_returns(self, num_workers, backup_workers):
    engine = self._engine(num_workers, backup_workers)
    self.liveness.is_complete = lambda: False

    def compute(worker):
      if worker == 0:
        self.liveness.dead_workers.add(0)
        raise tf.errors.UnavailableError(None, None, 'the worker is gone')

    engine.compute = compute
    self._train(engine, 4)
    engine.drain()
    report = engine.report()
    self.assertEqual(report['steps'], 4)
    self.assertEqual(report['dropped'], 4 * backup_workers)

  def test_lost_microbatch_does_not_wait_for_a_slow_worker(self):
    """Whoever is free takes it: two of three count."""
    engine = self._engine(3, backup_workers=1)
    self.liveness.is_complete = lambda: False
    is_slow = threading.Event()
    self.addCleanup(is_slow.set)
    have_begun = threading.Barrier(3)
    first = set(range(3))

    def compute(worker):
      if worker in first:
        first.discard(worker)
        have_begun.wait(_DEADLINE_SECONDS)
        if worker == 1:
          self.liveness.dead_workers.add(1)
          raise tf.errors.UnavailableError(None, None, 'the worker is gone')
        if worker == 2:
          is_slow.wait(3 * _DEADLINE_SECONDS)

    engine.compute = compute
    self._train(engine, 1)
    self.assertEqual(engine.report()['steps'], 1)


if __name__ == '__main__':
  absltest.main()
