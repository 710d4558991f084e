"""The processes of all peers for one number of workers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import network_namespaces, worker_pool
from benchmarks.process_peers import catalogue
from tf_strategies.launch import ports as ports_lib

_ACTOR = 'benchmarks.process_peers.actor:Actor'


class PeerPools:
  """Starts all peers, each on `world_size` workers.

  A context manager, which ends all processes at exit.

  Args:
    world_size: number of workers of each peer.
    entries: the peers.
    hosts: hosts of the workers, or None for this machine.
    torch_python: interpreter for gloo.
    deadline_seconds: maximum duration of each command.

  Attributes:
    entries: the peers.
    world_size: number of workers.
    versions: versions of the loaded modules, by pool.

  Raises:
    WorkerUnavailableError: if a worker failed. Names the worker and shows its output.
  """

  def __init__(
    self,
    world_size: int,
    entries: Sequence[catalogue.Entry],
    hosts: network_namespaces.NetworkNamespaces | None,
    torch_python: str = sys.executable,
    deadline_seconds: float = worker_pool.DEADLINE_SECONDS,
  ):
    self.world_size = world_size
    self.entries = tuple(entries)
    self.versions: dict[str, dict[str, str]] = {}
    self._hosts = hosts
    self._torch_python = torch_python
    self._deadline_seconds = deadline_seconds
    self._pools: dict[str, worker_pool.WorkerPool] = {}
    self._pool_of: dict[str, worker_pool.WorkerPool] = {}
    self._stack = contextlib.ExitStack()
    try:
      self._set_up(self.entries)
    except BaseException:
      self.close()
      raise

  def ask(self, peer: str, method: str, **arguments: Any) -> list[Any]:
    """Runs a method of the actor on all workers of a peer. Returns results by rank."""
    return self._pool_of[peer].ask(method, peer=peer, **arguments)

  def run(
    self, peer: str, warmup: int, repeats: int, calls: int
  ) -> list[float]:
    """Returns the seconds of each sample on the slowest rank."""
    by_rank = self.ask(peer, 'run', warmup=warmup, repeats=repeats, calls=calls)
    return [max(sample) for sample in zip(*by_rank, strict=True)]

  def close(self) -> None:
    """Ends all processes."""
    self._stack.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _set_up(self, entries: Sequence[catalogue.Entry]) -> None:
    for entry in entries:
      if entry.pool not in self._pools:
        self._pools[entry.pool] = self._stack.enter_context(
          self._start(entry.pool)
        )
      self._pool_of[entry.name] = self._pools[entry.pool]
    # The pools import their modules in parallel, the peers of a pool one by one.
    waiting = list(entries)
    while waiting:
      turn = {entry.pool: entry for entry in reversed(waiting)}
      for entry in turn.values():
        self._send_set_up(entry)
      for entry in turn.values():
        self.versions[entry.pool] = self._pool_of[entry.name].receive()[0]
        waiting.remove(entry)

  def _send_set_up(self, entry: catalogue.Entry) -> None:
    hosts = ('127.0.0.1',) * self.world_size
    interface = 'lo'
    if self._hosts is not None:
      hosts = self._hosts.addresses
      interface = network_namespaces.INTERFACE
    ports = ports_lib.pick_ports(self.world_size)
    self._pool_of[entry.name].send(
      'set_up',
      peer=entry.name,
      path=entry.path,
      addresses=[f'{h}:{p}' for h, p in zip(hosts, ports, strict=True)],
      interface=interface,
      timeout_seconds=self._deadline_seconds,
    )

  def _start(self, name: str) -> worker_pool.WorkerPool:
    python, env, launcher = sys.executable, {}, ()
    prefixes = [()] * self.world_size
    if self._hosts is not None:
      prefixes = [self._hosts.command(i, ()) for i in range(self.world_size)]
    if name == 'gloo' and self._torch_python != sys.executable:
      # The other interpreter cannot use this one's packages.
      python, env = self._torch_python, {'PYTHONPATH': ''}
    if name == 'mpi':
      launcher = (catalogue.mpiexec(), '-n', str(self.world_size))
    return worker_pool.WorkerPool(
      f'{name} ({self.world_size} workers)',
      _ACTOR,
      prefixes,
      python,
      launcher,
      env,
      self._deadline_seconds,
    )
