"""The pool of workers: what is on its way, and what an error leaves behind."""

import threading
import time

import tensorflow as tf
from absl.testing import absltest

from tf_strategies.strategies.parameter_server import worker_pool

_DEADLINE_SECONDS = 60.0


class _Liveness:
  """All tasks are alive."""

  generation = 0

  def dead_server(self):
    return None

  def is_worker_alive(self, worker):
    return True

  def changed_recently(self):
    return False

  def silent_tasks(self):
    return []


class _Task(worker_pool.Task):
  """Calls functions, and counts how often it was run."""

  def __init__(self, run=lambda: None, begin=lambda: None):
    self._run = run
    self._begin = begin
    self.runs = 0

  def begin(self, worker):
    self._begin()

  def run(self, worker):
    self.runs += 1
    self._run()

  def finish(self, worker):
    pass


class PoolTest(absltest.TestCase):
  def _pool(self, num_workers):
    pool = worker_pool.Pool(
      range(num_workers), _Liveness(), timeout_seconds=_DEADLINE_SECONDS
    )
    self.addCleanup(pool.close)
    return pool

  def test_task_that_a_worker_is_taking_is_on_its_way(self):
    pool, is_taken = self._pool(1), threading.Event()

    def take_a_while():
      is_taken.set()
      time.sleep(0.3)

    task = _Task(begin=take_a_while)
    pool.submit(task)
    self.assertTrue(is_taken.wait(_DEADLINE_SECONDS))
    # Neither in the queue nor running yet.
    self.assertFalse(pool.is_idle and not task.runs)
    pool.wait()
    self.assertEqual(task.runs, 1)
    self.assertTrue(pool.is_idle)
    self.assertFalse(pool.is_busy)

  def test_what_was_begun_before_an_error_is_not_begun_again(self):
    pool, was_raised = self._pool(2), threading.Event()

    def break_later():
      was_raised.wait(_DEADLINE_SECONDS)
      raise tf.errors.UnavailableError(None, None, 'the connection broke')

    def break_now():
      raise ValueError('the step itself')

    late = _Task(break_later)
    pool.submit(late)
    pool.wait(lambda: late.runs == 1)
    pool.submit(_Task(break_now))
    with self.assertRaisesRegex(ValueError, 'the step itself'):
      pool.wait()
    was_raised.set()
    self.assertEqual(pool.forget(), 0)
    self.assertTrue(pool.is_idle)
    after = _Task()
    pool.submit(after)
    pool.wait()
    self.assertEqual((late.runs, after.runs), (1, 1))

  def test_broken_connection_is_tried_again(self):
    pool, failures = self._pool(1), [1, 1]

    def break_twice():
      if failures:
        failures.pop()
        raise tf.errors.UnavailableError(None, None, 'the connection broke')

    task = _Task(break_twice)
    pool.submit(task)
    pool.wait()
    self.assertEqual(task.runs, 3)


if __name__ == '__main__':
  absltest.main()
