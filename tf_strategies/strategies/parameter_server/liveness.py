"""Who of the cluster is alive, and connecting to those that came back."""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Iterable

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import reachability
from tf_strategies.strategies.parameter_server import keepalive

_PROBE_SECONDS = 10.0
# A server's port opens a moment before it answers calls.
_SETTLE_SECONDS = 0.3
_UNSETTLED_SECONDS = 5.0
# Connecting waits for tasks that have died since they were looked for.
_CONNECT_SECONDS = 60.0


class State(enum.Enum):
  """What a task is to this process."""

  CONNECTED = 'connected'
  # Gone; or started again, so that it knows nothing of this process.
  DEAD = 'dead'
  # Stopped, or cut off: an answer may never come.
  SILENT = 'silent'


class Liveness:
  """Tells dead tasks from living ones, and connects to restarted ones.

  A task that was started again is another process: what this process has there
  (variables, iterators, functions) is gone, so it counts as dead until
  `rejoin` or `wait_for_all`.

  Whether a task answers at all is seen by the first bytes of HTTP/2, which gRPC
  speaks; whether it is the one that was connected to, by running an op there.
  TensorFlow has a question of its own (`check_alive`), but a task that was
  started again answers it too, and one that is stopped keeps it, and with it
  all threads of Python, for ever.

  Args:
    cluster: with the jobs ps and worker.
    keepalive_timeout: seconds without any answer after which calls to a task are
      given up, so that it counts as dead.
  """

  def __init__(
    self, cluster: config_lib.ClusterConfig, keepalive_timeout: float = 60.0
  ):
    self._addresses = {
      (job, index): address
      for job in ('ps', 'worker')
      for index, address in cluster.jobs[job].items()
    }
    self._lock = threading.Lock()
    # While connections are made anew, tasks cannot be told apart.
    self._is_settled = threading.Event()
    self._is_settled.set()
    self._changed_at = -math.inf
    self._generation = 0
    self._keepalive = keepalive.Keepalive(self._addresses, keepalive_timeout)

  @property
  def generation(self) -> int:
    """Goes up when connections have been made anew, to every task."""
    return self._generation

  def address(self, job: str, index: int) -> str:
    """Where a task listens."""
    return self._addresses[job, index]

  def _by_name(self) -> dict[str, str]:
    return {f'{job} {i}': a for (job, i), a in self._addresses.items()}

  def dead_server(self) -> int | None:
    """Index of the first parameter server that is not the one we know."""
    servers = [task for task in self._addresses if task[0] == 'ps']
    for task, state in self._states(servers).items():
      if self._is_gone(task, state):
        return task[1]
    return None

  def is_worker_alive(self, worker: int) -> bool:
    """Whether a worker is still the process that this one connected to.

    One that does not answer may be, until `keepalive_timeout`.
    """
    task = 'worker', worker
    return not self._is_gone(task, self._states([task])[task])

  def _is_gone(self, task: tuple[str, int], state: State) -> bool:
    return state is State.DEAD or self._keepalive.is_disconnected(task)

  def silent_tasks(self) -> list[str]:
    """Names of the tasks that do not answer (stopped, or cut off)."""
    states = self._states(self._addresses)
    return [
      f'{job} {index} at {self.address(job, index)}'
      for (job, index), state in states.items()
      if state is not State.CONNECTED
    ]

  def _states(
    self, tasks: Iterable[tuple[str, int]]
  ) -> dict[tuple[str, int], State]:
    """Asks tasks, all at the same time."""
    ends_at = time.monotonic() + _CONNECT_SECONDS
    while True:
      self._is_settled.wait(max(0.0, ends_at - time.monotonic()))
      generation = self._generation
      found = self._ask(tasks)
      # Tasks may seem dead while they are connected to.
      is_sure = self._generation == generation and self._is_settled.is_set()
      if is_sure or time.monotonic() > ends_at:
        return found

  def _ask(self, tasks) -> dict[tuple[str, int], State]:
    found = dict.fromkeys(tasks, State.SILENT)

    def ask(task):
      found[task] = self._state(task)

    threads = [
      threading.Thread(target=ask, args=(task,), daemon=True) for task in found
    ]
    for thread in threads:
      thread.start()
    ends_at = time.monotonic() + _PROBE_SECONDS
    for thread in threads:
      thread.join(max(0.0, ends_at - time.monotonic()))
    return dict(found)

  def _state(self, task: tuple[str, int]) -> State:
    answer = keepalive.ask(self._addresses[task])
    if answer is keepalive.Answer.NOTHING:
      return State.SILENT
    # No op is run where nobody answers: it might not return.
    is_known = (
      answer is keepalive.Answer.HELLO
      and not self._keepalive.is_disconnected(task)
      and _runs_ops(*task)
    )
    return State.CONNECTED if is_known else State.DEAD

  def server_error(self, server: int) -> errors.ParameterServerUnavailableError:
    """The error that names a dead parameter server."""
    address = self.address('ps', server)
    error = errors.ParameterServerUnavailableError(
      f'parameter server ps {server} at {address} died or was started again: '
      'the variables that it held are gone. Fix: start it again; with '
      'checkpoint_dir=... training goes on by itself from the latest '
      'checkpoint, without it start the coordinator again.'
    )
    error.server, error.address = server, address
    return error

  def is_complete(self) -> bool:
    """Whether every task answers.

    Connecting to one that was started again waits for all of them.
    """
    answers = keepalive.ask_all(self._addresses).values()
    return all(a is keepalive.Answer.HELLO for a in answers)

  def changed_recently(self) -> bool:
    """Whether the connections have just been made anew.

    TensorFlow may fail an op meanwhile, in ways that have nothing to do with
    it.
    """
    return time.monotonic() - self._changed_at < _UNSETTLED_SECONDS

  def rejoin(self, worker: int, lost_in: int) -> bool:
    """Connects to a worker that was started again.

    Args:
      worker: its index.
      lost_in: the `generation` in which it was lost.

    Returns:
      Whether it can be used.
    """
    with self._lock:
      # Another thread may have connected to all of them.
      if self._generation == lost_in or not self._is_connected(worker):
        if State.SILENT in self._states(self._addresses).values():
          return False
        self._connect_again()
      return self._is_connected(worker)

  def _is_connected(self, worker: int) -> bool:
    task = 'worker', worker
    return self._states([task])[task] is State.CONNECTED

  def wait_for_all(self, deadline_seconds: float) -> None:
    """Waits until every task listens, and connects to those that are new.

    Raises:
      RendezvousError: at the deadline; names the tasks that are missing.
    """
    ends_at = time.monotonic() + deadline_seconds
    reachability.wait_for_tasks(
      self._by_name(), deadline_seconds, 'to go on with training'
    )
    with self._lock:
      while True:
        states = self._states(self._addresses)
        silent = [t for t, state in states.items() if state is State.SILENT]
        if not silent:
          break
        if time.monotonic() > ends_at:
          job, index = silent[0]
          raise errors.RendezvousError(
            f'{job} {index} at {self.address(job, index)} does not answer, '
            f'after {deadline_seconds:g} s to go on with training. Fix: '
            'end it and start it again.'
          )
      self._connect_again()

  def close(self) -> None:
    """Ends the watch for silent tasks."""
    self._keepalive.close()

  def _connect_again(self):
    """Connects; waits for every task, so none may be silent."""
    self._is_settled.clear()
    self._changed_at = math.inf
    try:
      time.sleep(_SETTLE_SECONDS)
      _tf_internal.connect_again()
      self._keepalive.reset()
      self._generation += 1
    finally:
      self._changed_at = time.monotonic()
      self._is_settled.set()


def _runs_ops(job: str, index: int) -> bool:
  """Whether a task knows this process, and does what it asks for."""
  try:
    with (
      _tf_internal.own_executor(),
      tf.init_scope(),
      tf.device(f'/job:{job}/replica:0/task:{index}/device:CPU:0'),
    ):
      return int(tf.identity(tf.constant(1)).numpy()) == 1
  except tf.errors.OpError:
    return False
