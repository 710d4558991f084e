"""The processes of one job: servers and their coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from benchmarks import worker_pool
from benchmarks.parameter_server_peers import catalogue
from tf_strategies.launch import ports as ports_lib

_HERE = 'benchmarks.parameter_server_peers'
# Otherwise a call to a task that has ended waits for its return.
_ENV = {'GRPC_FAIL_FAST': 'use_caller'}


@dataclasses.dataclass(frozen=True)
class Size:
  """The number of tasks of a job.

  Attributes:
    num_workers: number of workers.
    num_ps: number of parameter servers.
  """

  num_workers: int
  num_ps: int

  @property
  def tasks(self) -> list[tuple[str, int]]:
    """Returns the job and index of each server, by rank.

    Example:

      >>> Size(num_workers=2, num_ps=1).tasks
      [('ps', 0), ('worker', 0), ('worker', 1)]
    """
    return [('ps', i) for i in range(self.num_ps)] + [
      ('worker', i) for i in range(self.num_workers)
    ]


class Job:
  """The tasks of one peer, which wait during the turns of others.

  A context manager, which ends all processes at exit. Each coordinator has its own
  process, because a process can only connect to one cluster.

  Args:
    peer: the peer that trains.
    size: size of the job.
    deadline_seconds: maximum duration of each command.

  Raises:
    WorkerUnavailableError: if a task failed. Names the task and shows its output.
  """

  def __init__(
    self,
    peer: catalogue.Peer,
    size: Size,
    deadline_seconds: float = worker_pool.DEADLINE_SECONDS,
  ):
    self.peer = peer
    self._deadline_seconds = deadline_seconds
    self._stack = contextlib.ExitStack()
    try:
      cluster = _cluster(size)
      servers = self._start('server:Server', len(size.tasks))
      self._coordinator = self._start('coordinator:Coordinator', 1)
      servers.ask('serve', cluster=cluster, tasks=size.tasks)
      self.ask('connect', peer=dataclasses.asdict(peer), cluster=cluster)
    except BaseException:
      self.close()
      raise

  def ask(self, method: str, **arguments: Any) -> Any:
    """Lets the coordinator run a method, and returns its result."""
    return self._coordinator.ask(method, **arguments)[0]

  def close(self) -> None:
    """Ends all processes."""
    self._stack.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _start(self, actor: str, count: int) -> worker_pool.WorkerPool:
    return self._stack.enter_context(
      worker_pool.WorkerPool(
        f'{self.peer.name}: {actor.partition(":")[0]}',
        f'{_HERE}.{actor}',
        [()] * count,
        env=_ENV,
        deadline_seconds=self._deadline_seconds,
      )
    )


def _cluster(size: Size) -> dict[str, list[str]]:
  ports = ports_lib.pick_ports(len(size.tasks) + 1)
  cluster: dict[str, list[str]] = {'chief': [f'127.0.0.1:{ports.pop()}']}
  for (job, _), port in zip(size.tasks, ports, strict=True):
    cluster.setdefault(job, []).append(f'127.0.0.1:{port}')
  return cluster
