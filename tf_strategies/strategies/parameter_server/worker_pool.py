"""One thread a worker, which runs tasks on it and outlives its death."""

from __future__ import annotations

import abc
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors
from tf_strategies.strategies.parameter_server import liveness as liveness_lib

_REJOIN_SECONDS = 0.5
_WAKE_SECONDS = 1.0
_SETTLE_SECONDS = 0.3
_PAUSE_SECONDS = 10.0
_MAX_RETRIES = 5
_MAX_LOSSES = 3

# What a task may fail with while all tasks of the cluster are alive, and do
# better the next time: a connection that broke, or one that a restarted task
# has not opened again yet.
_TRANSIENT = (
  tf.errors.UnavailableError,
  tf.errors.CancelledError,
  tf.errors.AbortedError,
  tf.errors.DeadlineExceededError,
)


class NotHereError(Exception):
  """A task that this worker cannot do, and another one can."""


class Task(abc.ABC):
  """Something to be done on some worker, once.

  Attributes:
    retries: how often it failed for transient reasons.
    losses: how many workers were lost while they ran it.
    attempt: the attempt of the pool that it belongs to.
  """

  retries = 0
  losses = 0
  attempt = 0

  @abc.abstractmethod
  def run(self, worker: int) -> None:
    """Does it on a worker; called in the worker's thread."""

  def may_run(self, worker: int) -> bool:
    """Whether a worker can do it now; called under the pool's lock."""
    del worker
    return True

  def begin(self, worker: int) -> None:
    """Called under the pool's lock when a worker takes it."""
    del worker

  def survive(self, worker: int) -> bool:
    """Called when it failed on a worker through no fault of its own.

    Notes what is left to do.

    Returns:
      Whether nothing is.
    """
    del worker
    return False

  @abc.abstractmethod
  def finish(self, worker: int) -> None:
    """Called when it has been done, under the pool's lock."""


class Pool:
  """Runs tasks on workers, in order of submission as workers become free.

  A task of a worker that dies goes to another one. The worker is used again
  when it was started again.

  Args:
    workers: their indices.
    liveness: tells who is alive.
    may_take: whether a worker may take the next task now, called under the
      lock; None if always.
    max_waiting: tasks that may wait in the queue before `submit` waits too.
    timeout_seconds: without any progress for so long, waiting raises an error.
  """

  def __init__(
    self,
    workers: Sequence[int],
    liveness: liveness_lib.Liveness,
    may_take: Callable[[int], bool] | None = None,
    max_waiting: int | None = None,
    timeout_seconds: float = 600.0,
  ):
    self.lock = threading.Condition()
    self.lost: set[int] = set()
    self._workers = tuple(workers)
    self._liveness = liveness
    self._may_take = may_take or (lambda worker: True)
    self._max_waiting = max_waiting or len(workers)
    self._timeout = timeout_seconds
    self._queue = collections.deque()
    self._running: dict[int, Task] = {}
    self._error: Exception | None = None
    self._is_open = True
    self._pauses = 0
    # What was submitted before an error was raised is not begun again.
    self._attempt = 0
    self._progress_at = time.monotonic()
    self._threads = [
      threading.Thread(
        target=self._serve, args=(w,), name=f'tfs-worker-{w}', daemon=True
      )
      for w in workers
    ]
    for thread in self._threads:
      thread.start()

  def submit(self, task: Task) -> None:
    """Adds a task; waits while too many are waiting.

    Raises:
      Exception: what an earlier task failed with.
    """
    with self.lock:
      self._wait(lambda: len(self._queue) < self._max_waiting)
      task.attempt = self._attempt
      self._queue.append(task)
      self.lock.notify_all()

  def wait(self, until: Callable[[], bool] | None = None) -> None:
    """Waits until all tasks are done, or until a condition holds.

    Args:
      until: the condition, called under the lock.

    Raises:
      Exception: what a task failed with.
      WorkerUnavailableError: nothing happened for `timeout_seconds`.
    """
    with self.lock:
      self._wait(until or (lambda: not self._queue and not self._running))

  def in_use(self) -> list[int]:
    """The workers that run a task or could take the next; under the lock."""
    waiting = self._queue[0] if self._queue else None
    return [
      w
      for w in self._workers
      if w not in self.lost
      and (w in self._running or (waiting is not None and waiting.may_run(w)))
    ]

  @property
  def is_idle(self) -> bool:
    """Whether nothing waits or runs."""
    # Under the lock: a task that a worker takes is for a moment in neither.
    with self.lock:
      return not self._queue and not self._running and self._error is None

  @property
  def is_busy(self) -> bool:
    """Whether anything waits or runs."""
    with self.lock:
      return bool(self._queue or self._running)

  def has(self, wanted: Callable[[Task], bool]) -> bool:
    """Whether a task of some kind waits or runs."""
    with self.lock:
      return any(map(wanted, [*self._queue, *self._running.values()]))

  def explain(self, error: Exception) -> Exception:
    """The error to raise for one that the coordinator itself has met."""
    server = self._liveness.dead_server()
    return error if server is None else self._liveness.server_error(server)

  def withdraw(self, tasks) -> int:
    """Takes back those tasks that nobody has begun; returns how many."""
    with self.lock:
      waiting = [t for t in tasks if t in self._queue]
      for task in waiting:
        self._queue.remove(task)
      return len(waiting)

  def close(self) -> None:
    """Ends the threads; tasks that run are left to themselves."""
    with self.lock:
      self._is_open = False
      self._queue.clear()
      self.lock.notify_all()

  def forget(self) -> int:
    """Drops the error and all waiting tasks; returns how many there were.

    Waits for those that run: they fail soon, or are done.
    """
    with self.lock:
      dropped = len(self._queue)
      self._drop_waiting()
      ends_at = time.monotonic() + self._timeout
      while self._running and time.monotonic() < ends_at:
        self.lock.wait(_WAKE_SECONDS)
      self._error = None
      return dropped

  def _wait(self, condition) -> None:
    self._progress_at = time.monotonic()
    while self._error is None and not condition():
      if not self.lock.wait(_WAKE_SECONDS):
        self._check_progress()
    if self._error is not None:
      error, self._error = self._error, None
      self._drop_waiting()
      raise error

  def _drop_waiting(self) -> None:
    self._queue.clear()
    self._attempt += 1

  def _put_back(self, task: Task) -> None:
    is_wanted = self._error is None and self._is_open
    if is_wanted and task.attempt == self._attempt:
      self._queue.appendleft(task)

  def _check_progress(self) -> None:
    if time.monotonic() - self._progress_at < self._timeout:
      return
    self.lock.release()
    try:
      silent = self._liveness.silent_tasks()
    finally:
      self.lock.acquire()
    raise errors.WorkerUnavailableError(
      f'no step was finished for {self._timeout:g} s. No answer from: '
      f'{", ".join(silent) or "nobody; the step itself takes too long"}. Way '
      'out: start those tasks again, or set a longer step_timeout.'
    )

  def _serve(self, worker: int) -> None:
    """The life of a worker's thread."""
    while True:
      task = self._take(worker)
      if task is None:
        return
      try:
        with _tf_internal.own_executor():
          task.run(worker)
      except NotHereError:
        with self.lock:
          self._put_back(task)
          self._end(worker)
      except Exception as e:
        self._handle(worker, task, e)
      else:
        with self.lock:
          task.finish(worker)
          self._end(worker)

  def _take(self, worker: int) -> Task | None:
    with self.lock:
      while self._is_open:
        if self._queue and not self._error and self._may_begin(worker):
          task = self._queue.popleft()
          task.begin(worker)
          self._running[worker] = task
          self.lock.notify_all()
          return task
        self.lock.wait()
      return None

  @contextlib.contextmanager
  def _pause(self) -> Iterator[None]:
    """Lets no task begin, and waits for those that run, but not for long.

    While TensorFlow connects again, functions fail that have nothing to do
    with it.
    """
    with self.lock:
      self._pauses += 1
      ends_at = time.monotonic() + _PAUSE_SECONDS
      while self._running and time.monotonic() < ends_at:
        self.lock.wait(_WAKE_SECONDS)
    try:
      yield
    finally:
      with self.lock:
        self._pauses -= 1
        self.lock.notify_all()

  def _may_begin(self, worker: int) -> bool:
    if self._pauses:
      return False
    return self._queue[0].may_run(worker) and self._may_take(worker)

  def _end(self, worker: int) -> None:
    """Under the lock: the worker is free again."""
    self._running.pop(worker, None)
    self._progress_at = time.monotonic()
    self.lock.notify_all()

  def _give_back(self, worker: int, task: Task) -> None:
    # The servers may still be at it: what they got before the failure.
    time.sleep(_SETTLE_SECONDS)
    is_done = task.survive(worker)
    with self.lock:
      if is_done:
        task.finish(worker)
        self._end(worker)
        return
      task.retries += 1
      self._put_back(task)
      self._end(worker)

  def _handle(self, worker: int, task: Task, error: Exception) -> None:
    """Decides who is to blame: a server, the worker, a moment, or the step."""
    server = self._liveness.dead_server()
    if server is not None:
      self._fail(worker, self._liveness.server_error(server), error)
    elif not self._liveness.is_worker_alive(worker):
      self._outlive(worker, task, error)
    elif self._is_transient(error) and task.retries < _MAX_RETRIES:
      logging.warning('worker %d: %s; once more', worker, _first_line(error))
      time.sleep(_REJOIN_SECONDS)
      self._give_back(worker, task)
    else:
      self._fail(worker, error)

  def _deadly(self, worker, address, error) -> errors.WorkerUnavailableError:
    found = errors.WorkerUnavailableError(
      f'worker {worker} at {address} is the third that was lost in one step '
      f'({_first_line(error)}): the step itself may be what ends them. Fix: '
      "look at the workers' logs."
    )
    found.rank, found.address = worker, address
    return found

  def _is_transient(self, error: Exception) -> bool:
    if isinstance(error, _TRANSIENT):
      return True
    return (
      isinstance(error, tf.errors.OpError) and self._liveness.changed_recently()
    )

  def _fail(self, worker, error, cause=None) -> None:
    with self.lock:
      if self._error is None:
        error.__cause__ = cause
        self._error = error
      self._end(worker)

  def _outlive(self, worker: int, task: Task, error: Exception) -> None:
    """Gives the task to others and waits until the worker is back."""
    address = self._liveness.address('worker', worker)
    logging.warning(
      'worker %d at %s was lost (%s): its step goes to another one',
      worker,
      address,
      _first_line(error),
    )
    lost_at, lost_in = time.monotonic(), self._liveness.generation
    task.losses += 1
    with self.lock:
      self.lost.add(worker)
    if task.losses >= _MAX_LOSSES:
      self._fail(worker, self._deadly(worker, address, error), error)
    else:
      self._give_back(worker, task)
    while self._is_open:
      try:
        if self._liveness.is_complete():
          with self._pause():
            if self._liveness.rejoin(worker, lost_in):
              break
      except tf.errors.OpError as e:
        logging.warning('worker %d: %s; trying again', worker, _first_line(e))
      time.sleep(_REJOIN_SECONDS)
    with self.lock:
      self.lost.discard(worker)
      self.lock.notify_all()
    logging.warning(
      'worker %d at %s is back after %.1f s',
      worker,
      address,
      time.monotonic() - lost_at,
    )


def _first_line(error: BaseException) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
