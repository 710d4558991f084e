"""The pool of workers: tasks in progress, and tasks that an error interrupts."""

import threading

import tensorflow as tf
from absl.testing import absltest, parameterized

from tests.strategies.parameter_server import fakes
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import worker_pool

_DEADLINE_SECONDS = fakes.DEADLINE_SECONDS


class _Task(worker_pool.Task):
  """A task that calls the given functions, and counts its runs."""

  def __init__(self, run=lambda: None, **hooks):
    self._hooks = {'run': run, **hooks}
    self.runs = 0

  def _call(self, name, default=None):
    return self._hooks[name]() if name in self._hooks else default

  def has_work_for(self, worker):
    return self._call('has_work', True)

  def may_begin(self, worker):
    return True

  def is_wanted(self):
    return self._call('is_wanted', True)

  def run(self, worker):
    self.runs += 1
    self._call('run')


class PoolTest(parameterized.TestCase):
  def _pool(self, num_workers):
    pool, self.liveness = fakes.pool(self, num_workers)
    return pool

  def _die(self, error=tf.errors.UnavailableError):
    self.liveness.dead_workers.add(0)
    raise error(None, None, 'the worker is gone')

  def test_task_begun_before_an_error_is_not_repeated(self):
    pool, was_raised = self._pool(2), threading.Event()

    def break_later():
      was_raised.wait(_DEADLINE_SECONDS)
      raise tf.errors.UnavailableError(None, None, 'the connection broke')

    def break_now():
      raise ValueError('an error of the step')

    late = _Task(break_later)
    pool.submit(late)
    pool.wait(lambda: late.runs == 1)
    pool.submit(_Task(break_now))
    with self.assertRaisesRegex(ValueError, 'an error of the step'):
      pool.wait()
    was_raised.set()
    pool.forget()
    self.assertFalse(pool.is_busy())
    after = _Task()
    pool.submit(after)
    pool.wait()
    self.assertEqual((late.runs, after.runs), (1, 1))

  def test_task_that_lost_three_workers_raises(self):
    pool = self._pool(1)
    task = _Task(self._die)
    pool.submit(task)
    with self.assertRaisesRegex(errors.WorkerUnavailableError, 'the third'):
      pool.wait()
    self.assertEqual((task.runs, task.losses), (3, 3))

  def test_task_with_side_effects_is_not_repeated(self):
    pool = self._pool(2)

    def die():
      task.may_repeat = False
      self._die(tf.errors.InvalidArgumentError)

    task = _Task(die)
    pool.submit(task)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, 'is gone'):
      pool.wait()
    self.assertEqual(task.runs, 1)

  def _die_once(self):
    def die():
      if task.runs == 1:
        self.liveness.dead_workers.add(task.worker)
        raise tf.errors.UnavailableError(None, None, 'the worker is gone')

    task = _Task(die)
    return task

  def _on_rejoin(self, action):
    def rejoin(worker):
      action()
      self.liveness.dead_workers.discard(worker)
      return True

    self.liveness.rejoin = rejoin

  def test_no_reconnect_while_a_task_runs(self):
    pool, may_end, is_back = self._pool(2), threading.Event(), threading.Event()
    self._on_rejoin(is_back.set)
    pool.submit(_Task(lambda: may_end.wait(_DEADLINE_SECONDS)))
    task = self._die_once()
    pool.submit(task)
    self.assertFalse(is_back.wait(1.0))
    may_end.set()
    self.assertTrue(is_back.wait(_DEADLINE_SECONDS))
    pool.wait()
    self.assertEqual(task.runs, 2)

  def test_task_is_repeated_after_a_broken_connection(self):
    pool, failures = self._pool(1), [1, 1]

    def break_twice():
      if failures:
        failures.pop()
        raise tf.errors.UnavailableError(None, None, 'the connection broke')

    task = _Task(break_twice)
    pool.submit(task)
    pool.wait()
    self.assertEqual(task.runs, 3)

  @parameterized.parameters(
    ('run', SystemExit),
    ('run', errors.DataError),
    ('has_work', KeyboardInterrupt),
  )
  def test_exception_in_a_worker_thread_is_raised(self, hook, kind):
    pool = self._pool(1)

    def fail():
      raise kind('from the thread')

    pool.submit(_Task(**{hook: fail}))
    with self.assertRaisesRegex(kind, 'from the thread'):
      pool.wait()
    # The thread is still alive.
    after = _Task()
    pool.submit(after)
    pool.wait()
    self.assertEqual(after.runs, 1)

  def test_unwanted_task_does_not_block_the_queue(self):
    pool, are_waiting = self._pool(2), threading.Event()
    left = [True, True]

    def run():
      are_waiting.wait(_DEADLINE_SECONDS)
      left.pop()

    # Wanted until the first tasks are done, but no worker can run it.
    unwanted = _Task(is_wanted=lambda: bool(left), has_work=lambda: False)
    last = _Task()
    for task in (_Task(run), _Task(run), unwanted, last):
      pool.submit(task)
    are_waiting.set()
    pool.wait()
    self.assertEqual((unwanted.runs, last.runs), (0, 1))

  def test_only_forget_waits_for_an_unwanted_task(self):
    """`forget` waits because functions may fail during a reconnect."""
    pool, is_taken = self._pool(2), threading.Event()
    may_end = threading.Event()
    self.addCleanup(may_end.set)

    def run():
      is_taken.set()
      may_end.wait(_DEADLINE_SECONDS)

    late = _Task(run, is_wanted=lambda: not late.runs)
    pool.submit(late)
    self.assertTrue(is_taken.wait(_DEADLINE_SECONDS))
    other = _Task()
    pool.submit(other)
    pool.wait()
    self.assertEqual(other.runs, 1)
    self.assertFalse(pool.is_busy())
    forgetting = threading.Thread(target=pool.forget)
    forgetting.start()
    forgetting.join(0.5)
    self.assertTrue(forgetting.is_alive())
    may_end.set()
    forgetting.join(_DEADLINE_SECONDS)
    self.assertFalse(forgetting.is_alive())

  def test_step_after_close_is_refused(self):
    pool = self._pool(1)
    pool.close()
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'close'):
      pool.submit(_Task())


if __name__ == '__main__':
  absltest.main()
