"""Who of the cluster is alive, and connecting to those that came back."""

from __future__ import annotations

import math
import threading
import time

from tf_strategies import _tf_internal, errors
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import reachability

_PROBE_SECONDS = 10.0
# A server's port opens a moment before it answers calls.
_SETTLE_SECONDS = 0.3
_UNSETTLED_SECONDS = 5.0


class Liveness:
  """Tells dead tasks from living ones, and connects to restarted ones.

  A task that was started again is another process: what this process has there
  (variables, iterators, functions) is gone, so it counts as dead until
  `rejoin`.

  Args:
    cluster: with the jobs ps and worker.
  """

  def __init__(self, cluster: config_lib.ClusterConfig):
    self._addresses = {
      (job, index): address
      for job in ('ps', 'worker')
      for index, address in cluster.jobs[job].items()
    }
    self._lock = threading.Lock()
    self._changed_at = -math.inf

  def address(self, job: str, index: int) -> str:
    """Where a task listens."""
    return self._addresses[job, index]

  def _by_name(self) -> dict[str, str]:
    return {f'{job} {i}': a for (job, i), a in self._addresses.items()}

  def dead_server(self) -> int | None:
    """Index of the first parameter server that is not the one we know."""
    for job, index in self._addresses:
      if job == 'ps' and not _tf_internal.is_task_alive(job, index):
        return index
    return None

  def is_worker_alive(self, worker: int) -> bool:
    """Whether a worker is still the process that this one connected to."""
    return _tf_internal.is_task_alive('worker', worker)

  def server_error(self, server: int) -> errors.ParameterServerUnavailableError:
    """The error that names a dead parameter server."""
    address = self.address('ps', server)
    error = errors.ParameterServerUnavailableError(
      f'parameter server ps {server} at {address} died or was started again: '
      'the variables that it held are gone. Way out: start it again; with '
      'checkpoint_dir=... training goes on by itself from the latest '
      'checkpoint, without it start the coordinator again.'
    )
    error.server, error.address = server, address
    return error

  def is_complete(self) -> bool:
    """Whether every task listens.

    Connecting to one that was started again waits for all of them.
    """
    return not reachability.unreachable(self._by_name())

  def changed_recently(self) -> bool:
    """Whether the connections have just been made anew.

    TensorFlow may fail an op meanwhile, in ways that have nothing to do with
    it.
    """
    return time.monotonic() - self._changed_at < _UNSETTLED_SECONDS

  def rejoin(self, worker: int) -> bool:
    """Connects to a worker that was started again.

    Returns:
      Whether it can be used.
    """
    with self._lock:
      if self.is_worker_alive(worker):
        return True
      self._connect_again()
    return self.is_worker_alive(worker)

  def wait_for_all(self, deadline_seconds: float) -> None:
    """Waits until every task listens, and connects to those that are new.

    Raises:
      RendezvousError: at the deadline; names the tasks that are missing.
    """
    reachability.wait_for_tasks(
      self._by_name(), deadline_seconds, 'to go on with training'
    )
    with self._lock:
      self._connect_again()

  def _connect_again(self):
    self._changed_at = math.inf
    try:
      time.sleep(_SETTLE_SECONDS)
      _tf_internal.connect_again()
    finally:
      self._changed_at = time.monotonic()

  def silent_tasks(self) -> list[str]:
    """Names of the tasks that do not answer a call (stopped, or cut off)."""
    answered = set()

    def probe(task):
      if _tf_internal.is_task_alive(*task):
        answered.add(task)

    # Daemons: a call to a stopped process never returns.
    threads = [
      threading.Thread(target=probe, args=(task,), daemon=True)
      for task in self._addresses
    ]
    for thread in threads:
      thread.start()
    ends_at = time.monotonic() + _PROBE_SECONDS
    for thread in threads:
      thread.join(max(0.0, ends_at - time.monotonic()))
    silent = [task for task in self._addresses if task not in answered]
    return [f'{job} {i} at {self.address(job, i)}' for job, i in silent]
