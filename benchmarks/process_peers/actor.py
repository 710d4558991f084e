"""The process of a worker, which creates peers and runs them on command."""

from __future__ import annotations

import importlib
import platform
import sys
import time
from collections.abc import Sequence

from benchmarks.process_peers import base

_VERSIONS_OF = ('tensorflow', 'torch', 'numpy', 'mpi4py')


class Actor:
  """The peers of one worker. `pool_worker` calls the methods.

  Args:
    rank: rank of this worker, or None if the peer determines it.
  """

  def __init__(self, rank: int | None):
    self._rank = rank
    self._peers: dict[str, base.Peer] = {}

  def set_up(
    self,
    peer: str,
    path: str,
    addresses: Sequence[str],
    interface: str,
    timeout_seconds: float,
  ) -> dict[str, str]:
    """Creates a peer and connects it to the other workers.

    Args:
      peer: name of the peer.
      path: its class, as 'module:Class'.
      addresses: addresses of the peer on each worker.
      interface: see `Seat`.
      timeout_seconds: see `Seat`.

    Returns:
      Versions of the loaded modules.
    """
    seat = base.Seat(
      -1 if self._rank is None else self._rank,
      tuple(addresses),
      interface,
      timeout_seconds,
    )
    module, _, name = path.partition(':')
    self._peers[peer] = getattr(importlib.import_module(module), name)(seat)
    versions = {
      name: sys.modules[name].__version__
      for name in _VERSIONS_OF
      if name in sys.modules
    }
    return {'python': platform.python_version(), **versions}

  def prepare(self, peer: str, num_bytes: int) -> None:
    """Creates a peer's tensors, calls it once and checks the result.

    Raises:
      RuntimeError: if the result is wrong.
    """
    this = self._peers[peer]
    this.num_bytes = num_bytes
    this.prepare()
    this.before(1)
    this.check(this.call())

  def run(
    self, peer: str, warmup: int, repeats: int, calls: int
  ) -> list[float]:
    """Returns the mean seconds of a call on this worker, for each repeat.

    Args:
      peer: name of the peer.
      warmup: number of untimed calls before.
      repeats: number of repeats, each of which begins with a barrier.
      calls: number of calls per repeat.
    """
    this = self._peers[peer]
    this.before(warmup)
    for _ in range(warmup):
      this.call()
    seconds = []
    for _ in range(repeats):
      this.before(calls)
      this.barrier()
      start = time.perf_counter()
      for _ in range(calls):
        returned = this.call()
      seconds.append((time.perf_counter() - start) / calls)
      # Frees memory outside of the timed span and before the next call.
      del returned
    return seconds

  def release(self, peer: str) -> None:
    """Frees the memory of a peer's tensors."""
    self._peers[peer].release()
