"""A thread for each worker, which runs tasks there and survives its death."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from absl import logging

from tf_strategies import _graph_errors, _tf_internal, errors
from tf_strategies.strategies.parameter_server import connection

_REJOIN_SECONDS = 0.5
_WAKE_SECONDS = 1.0
_PAUSE_SECONDS = 10.0
_END_SECONDS = 5.0
_MAX_RETRIES = 5
_MAX_LOSSES = 3

# Failures that a retry may cure while all tasks of the cluster are alive: a
# connection that broke, or one that a restarted task has not opened again yet.
_TRANSIENT = (
  tf.errors.UnavailableError,
  tf.errors.CancelledError,
  tf.errors.AbortedError,
  tf.errors.DeadlineExceededError,
)


class NotHereError(Exception):
  """A task that this worker cannot run and another one can."""


class Task:
  """Something to be done once, on any worker.

  Subclasses define these methods. All but `run` are called under the pool's lock:

  * `run(worker)` does it on a worker, in the worker's thread.
  * `is_wanted()` returns whether anybody still needs it. If not, it leaves the queue,
    and nobody waits for the worker that runs it. It must not be wanted again.
  * `has_work_for(worker)` returns whether a worker can run it.
  * `may_begin(worker)` returns whether a worker that can run it may do so now.
  """

  # How often it failed and was put back, and how many workers were lost while they
  # ran it.
  retries = losses = 0
  attempt = 0  # Of the pool, in which it was submitted.
  # Whether another worker may repeat it, because it has changed nothing yet.
  may_repeat = True
  worker: int | None = None  # That took it.


class WorkerPool:
  """Runs tasks on workers, in order of submission as workers become free.

  A task that fails because its worker died goes to another one; a restarted worker is used
  again. `wait` and `submit` raise any exception that no retry cures, and the
  worker's thread continues with the next task. `submit` waits while there is a task in
  the queue for each worker. Waiting without any progress for
  `timeout_seconds` raises an error.
  """

  def __init__(
    self,
    workers: Sequence[int],
    liveness: connection.Liveness,
    timeout_seconds: float = 600.0,
  ):
    self.workers = tuple(workers)
    self.lock = threading.Condition()
    self.lost: set[int] = set()  # Workers that have not joined again.
    # How often each worker was given up. It loses its iterators then.
    self.lives = collections.Counter()
    self._liveness = liveness
    self._timeout = timeout_seconds
    self._queue: collections.deque[Task] = collections.deque()
    self._running: dict[int, Task] = {}
    self._error: BaseException | None = None
    # What `submit` raises; the one place that every step of every mode passes.
    self.refusal: Exception | None = None
    self._is_open = True
    self._pauses = 0
    self._num_connecting = 0  # Threads that connect to a task again.
    # Number of the current attempt. Tasks of earlier attempts, before an error
    # was raised, are dropped.
    self.attempt = 0
    self._progress_at = time.monotonic()
    for worker in self.workers:
      threading.Thread(
        target=self._serve,
        args=(worker,),
        name=f'tfs-worker-{worker}',
        daemon=True,
      ).start()

  def submit(self, task: Task) -> None:
    """Adds a task, or raises what an earlier one failed with."""
    with self.lock:
      self.check_accepts()
      self._wait(
        lambda: len(self._queue) < len(self.workers) or not self._is_open
      )
      if not self._is_open:
        raise errors.UnsupportedOptionError(
          'a step after it',
          'steps before strategy.close()',
          'create another strategy',
        )
      task.attempt = self.attempt
      self._queue.append(task)
      self._discard_unwanted()
      self.lock.notify_all()

  def wait(self, until: Callable[[], bool] | None = None) -> None:
    """Waits until all tasks that are wanted are done, or until a condition holds.

    Raises what a task failed with, or `WorkerUnavailableError` if nothing
    happened for `timeout_seconds`.
    """
    with self.lock:
      self._wait(until or (lambda: not self.is_busy()))

  def in_use(self) -> list[int]:
    """The workers that run a task or could run the next; under the lock."""
    waiting = self._queue[0] if self._queue else None
    return [
      w
      for w in self.workers
      if w not in self.lost
      and (w in self._running or (waiting and waiting.has_work_for(w)))
    ]

  def is_busy(self) -> bool:
    """Returns whether any task that is wanted waits or runs."""
    # Under the lock: a task that a worker takes is for a moment in neither.
    with self.lock:
      tasks = [*self._queue, *self._running.values()]
      return any(task.is_wanted() for task in tasks)

  def readers(self, also_late: bool) -> list[int]:
    """Returns which worker reads each split now.

    It is the one with the number of the split, or the next one that is alive; if not
    `also_late`, the next one that does not run what nobody wants any more.
    """
    with self.lock:
      away = set(self.lost)
      for worker, task in self._running.items():
        if not (also_late or task.is_wanted()):
          away.add(worker)
    return [
      next((w for w in self.workers[i:] + self.workers[:i] if w not in away), i)
      for i in self.workers
    ]

  def close(self) -> None:
    """Ends the threads; tasks that run are left to themselves."""
    with self.lock:
      self._is_open = False
      self._queue.clear()
      self.lock.notify_all()

  def end(self, error: Exception) -> None:
    """Raises `error` for whoever waits or submits; returns when no task runs."""
    with self.lock:
      self.refusal = self._error = error
      self.close()
      self._wait_for_running(_END_SECONDS)

  def check_accepts(self) -> None:
    """Raises `refusal`, if there is one."""
    if self.refusal is not None:
      raise self.refusal

  def forget(self) -> None:
    """Drops the error and all waiting tasks, and waits for all that run.

    Also for those that nobody wants: functions may fail while TensorFlow connects
    again.
    """
    with self.lock:
      self._drop_waiting()
      self._wait_for_running(self._timeout)
      self._error = None

  def _wait_for_running(self, seconds) -> None:
    """Under the lock: waits for the tasks that run, but no longer."""
    ends_at = time.monotonic() + seconds
    while self._running and time.monotonic() < ends_at:
      self.lock.wait(_WAKE_SECONDS)

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
    self.attempt += 1

  def _check_progress(self) -> None:
    if time.monotonic() - self._progress_at < self._timeout:
      return
    self.lock.release()
    try:
      silent = self._liveness.silent_tasks()
    finally:
      self.lock.acquire()
    raise errors.WorkerUnavailableError(
      f'Expected a finished step within {self._timeout:g} s, got no answer '
      'from: '
      f'{", ".join(silent) or "nobody; the step itself takes too long"}. Fix: '
      'restart those tasks, or set a longer step_timeout.'
    )

  def _serve(self, worker: int) -> None:
    """The life of a worker's thread, which no exception ends."""
    while self._is_open:
      try:
        if worker in self.lost:
          self._rejoin(worker)
        task = self._take(worker)
        if task is not None:
          self._run(worker, task)
      except BaseException as e:
        with self.lock:
          task = self._running.get(worker)
          # Errors of tasks that began before the last error were already
          # reported.
          if not task or task.attempt == self.attempt or _is_of_server(e):
            self._error = self._error or e
          self._end(worker)
        time.sleep(_REJOIN_SECONDS)

  def _take(self, worker: int) -> Task | None:
    """The next task for a worker; None when the pool is closed."""
    with self.lock:
      while self._is_open:
        if self._may_begin(worker):
          task = self._queue.popleft()
          self._running[worker] = task
          task.worker = worker
          self.lock.notify_all()
          return task
        self.lock.wait(_WAKE_SECONDS)
      return None

  def _may_begin(self, worker: int) -> bool:
    if not self._queue or self._error or self._pauses:
      return False
    task = self._queue[0]
    return task.has_work_for(worker) and task.may_begin(worker)

  def _run(self, worker: int, task: Task) -> None:
    try:
      with _tf_internal.own_executor():
        task.run(worker)
    except NotHereError:
      self._put_back(worker, task)
    except Exception as e:
      self._handle(worker, task, e)
    else:
      with self.lock:
        self._end(worker)

  def _put_back(self, worker: int, task: Task) -> None:
    """Leaves a task to others; the worker is free again."""
    with self.lock:
      task.worker = None
      if self._is_open and not self._error and task.attempt == self.attempt:
        self._queue.appendleft(task)
      self._end(worker)

  def _end(self, worker: int) -> None:
    """Under the lock: the worker is free again."""
    self._running.pop(worker, None)
    self._discard_unwanted()
    self._progress_at = time.monotonic()
    self.lock.notify_all()

  def _discard_unwanted(self) -> None:
    """Drops tasks that nobody wants, which would block the others; under the lock."""
    for task in [t for t in self._queue if not t.is_wanted()]:
      self._queue.remove(task)

  def _handle(self, worker: int, task: Task, error: Exception) -> None:
    """Decides what failed: a server, the worker, a connection, or the step."""
    if _is_of_server(error):
      raise error
    self._check_servers(error)
    is_of_graph = isinstance(error, tf.errors.OpError)
    is_transient = isinstance(error, _TRANSIENT) or (
      is_of_graph and self._liveness.changed_recently()
    )
    if is_transient and not task.may_repeat:
      # Servers may have applied an update or not.
      for _ in range(_MAX_RETRIES):
        # It may be one that is just being restarted.
        time.sleep(_REJOIN_SECONDS)
        self._check_servers(error)
      raise self._liveness.broken_update() from error
    is_lost = task.may_repeat and not self._liveness.is_worker_alive(worker)
    if is_lost:
      self._lose(worker, error)
    elif is_transient and task.retries < _MAX_RETRIES:
      logging.warning('worker %d: %s; retrying', worker, _first_line(error))
      time.sleep(_REJOIN_SECONDS)
    else:
      raise _graph_errors.readable(error) if is_of_graph else error from None
    self.lives[worker] += 1
    task.retries += 1
    task.losses += is_lost
    if task.losses >= _MAX_LOSSES:
      raise self._too_many(worker, error) from error
    self._put_back(worker, task)

  def _check_servers(self, error: Exception) -> None:
    dead = self._liveness.server_error()
    if dead is not None:
      raise dead from error

  def _lose(self, worker: int, error: Exception) -> None:
    """Notes that a worker is lost."""
    logging.warning(
      'worker %d at %s was lost (%s): its step goes to another one',
      worker,
      self._liveness.address('worker', worker),
      _first_line(error),
    )
    with self.lock:
      self.lost.add(worker)

  def _too_many(self, worker: int, error: Exception) -> Exception:
    address = self._liveness.address('worker', worker)
    found = errors.WorkerUnavailableError(
      f'worker {worker} at {address} is the third that was lost in one step '
      f"({_first_line(error)}): it may end them itself. Fix: see the workers' logs."
    )
    found.rank, found.address = worker, address
    return found

  def _rejoin(self, worker: int) -> None:
    """Waits until a lost worker is back, or the pool is closed."""
    lost_at = time.monotonic()
    while self._is_open:
      try:
        if self._liveness.is_complete():
          with self._pause():
            if self._liveness.rejoin(worker):
              break
      except tf.errors.OpError as e:
        logging.warning('worker %d: %s; trying again', worker, _first_line(e))
      time.sleep(_REJOIN_SECONDS)
    with self.lock:
      self.lost.remove(worker)
      self.lock.notify_all()
    logging.warning(
      'worker %d at %s is back after %.1f s',
      worker,
      self._liveness.address('worker', worker),
      time.monotonic() - lost_at,
    )

  @contextlib.contextmanager
  def _pause(self) -> Iterator[None]:
    """Lets no task begin, and waits for those that run, but not for long.

    Any function may fail while TensorFlow connects again.
    """
    with self.lock:
      self._pauses += 1
      self._wait_for_running(_PAUSE_SECONDS)
      self._num_connecting += 1
    try:
      yield
    finally:
      with self.lock:
        self._pauses -= 1
        self._num_connecting -= 1
        self.lock.notify_all()

  def wait_for_connections(self) -> None:
    """Waits while TensorFlow connects again, for which `Keepalive` is a deadline.

    Called under the lock, by a task that is about to apply an update.
    """
    while self._num_connecting:
      self.lock.wait(_WAKE_SECONDS)


def _is_of_server(error: BaseException) -> bool:
  return isinstance(error, errors.ParameterServerUnavailableError)


def _first_line(error: BaseException) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
