"""MPI as a process group uses it: bytes move, ranks wait without hanging.

MPI's blocking calls spin, and nothing wakes them: with more ranks than cores
they keep those from the CPU that they wait for, and after a peer stops they
never return. So every call here is a non-blocking one that is tested in a loop,
which yields, looks at the clock and notices that the group has failed.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_strategies import errors

# How long a wait only yields before it sleeps: for ranks that are not there
# yet, and for bytes, which in shared memory move only while MPI is called.
_PATIENCE_WAITING = 0.001
_PATIENCE_MOVING = 0.1
_SLEEP_SECONDS = 0.0001
# Looks at the clock after this many yields: a microsecond each or less.
_YIELDS = 16
_FINALIZE_SECONDS = 10.0

_yield = getattr(os, 'sched_yield', lambda: time.sleep(0))


class DeadlineError(Exception):
  """Something did not finish in time; never leaves the room."""


def load() -> Any:
  """The module `mpi4py.MPI`; the first import initialises MPI.

  Raises:
    UnsupportedOptionError: there is none, it is already finalized, or it
      forbids calls from several threads.
  """
  try:
    from mpi4py import MPI
  except (ImportError, RuntimeError) as e:
    raise errors.UnsupportedOptionError(
      f'a process group over MPI without mpi4py ({e})',
      'an environment that has mpi4py and an MPI library',
      "in the checkout run: pip install '.[mpi]'; or use the group over TCP",
    ) from e
  if MPI.Is_finalized():
    raise errors.UnsupportedOptionError(
      'a process group after MPI was finalized',
      'MPI once in the life of a process',
      'form the group before MPI.Finalize()',
    )
  if not MPI.Is_initialized():
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
  if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
    raise errors.UnsupportedOptionError(
      f'MPI with thread level {MPI.Query_thread()}',
      f'MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}): collectives run in '
      'threads of their own',
      "leave mpi4py.rc.thread_level at 'multiple', or use an MPI library that "
      'was built with it',
    )
  # Once, and before any group's own handler, which then runs earlier.
  atexit.unregister(_finalize)
  atexit.register(_finalize, MPI)
  return MPI


class Communicator:
  """The ranks of one group, and the collectives that move bytes.

  One thread at a time. Made by all ranks of `parent` at the same time.

  Args:
    mpi: the module `mpi4py.MPI`.
    deadline: until when the others must have come, in seconds of the monotonic
      clock.

  Raises:
    DeadlineError: they did not.
  """

  def __init__(self, mpi: Any, deadline: float):
    self._mpi = mpi
    world = mpi.COMM_WORLD
    self.rank, self.size = world.rank, world.size
    # Making a communicator blocks: first be sure that all are here.
    self.wait(world.Ibarrier(), (), deadline)
    # Never freed, as that waits for the others too.
    self._comm = world.Dup()

  def gather_equal(
    self, part: np.ndarray, parts: np.ndarray, *how: Any, moving: bool = True
  ) -> None:
    """Brings as many bytes of every rank to every rank.

    Args:
      part: uint8, of this rank.
      parts: uint8, `size` times as long.
      *how: the deadline and the check of `wait`.
      moving: False where ranks may be late.
    """
    byte = self._mpi.BYTE
    request = self._comm.Iallgather([part, byte], [parts, byte])
    self.wait(request, (part, parts), *how, moving=moving)

  def gather(
    self, part: np.ndarray, parts: np.ndarray, sizes: Sequence[int], *how: Any
  ) -> None:
    """As `gather_equal`, with `sizes[rank]` bytes of each rank."""
    self._check_counts(parts)
    byte = self._mpi.BYTE
    request = self._comm.Iallgatherv(
      [part, byte], [parts, sizes, _starts(sizes), byte]
    )
    self.wait(request, (part, parts), *how)

  def gather_own(
    self, parts: np.ndarray, sizes: Sequence[int], *how: Any
  ) -> None:
    """As `gather`; what this rank brings lies in `parts` already."""
    self._check_counts(parts)
    byte = self._mpi.BYTE
    request = self._comm.Iallgatherv(
      self._mpi.IN_PLACE, [parts, sizes, _starts(sizes), byte]
    )
    self.wait(request, (parts,), *how)

  def scatter_all(
    self, data: np.ndarray, sizes: Sequence[int], rows: np.ndarray, *how: Any
  ) -> None:
    """Brings this rank's chunk of every other rank's data here.

    Args:
      data: uint8; `sizes[rank]` bytes for each rank, in order.
      sizes: of the chunks.
      rows: uint8, `size` rows of `sizes[self.rank]`; this rank's own row stays
        as it is.
      *how: the deadline and the check of `wait`.
    """
    self._check_counts(data, rows)
    starts, own, rank = _starts(sizes), sizes[self.rank], self.rank
    send = [0 if r == rank else n for r, n in enumerate(sizes)]
    receive = [0 if r == rank else own for r in range(self.size)]
    places = [own * r for r in range(self.size)]
    byte = self._mpi.BYTE
    request = self._comm.Ialltoallv(
      [data, send, starts, byte], [rows, receive, places, byte]
    )
    self.wait(request, (data, rows), *how)

  def broadcast(self, data: np.ndarray, root: int, *how: Any) -> None:
    """Brings the root's bytes to everyone; uint8."""
    self._check_counts(data)
    request = self._comm.Ibcast([data, self._mpi.BYTE], root)
    self.wait(request, (data,), *how)

  def gather_values(self, value: Any, deadline: float) -> list[Any]:
    """Brings a value of every rank, as JSON can say it, to every rank.

    Raises:
      DeadlineError: a rank did not come in time.
    """
    part = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.empty(self.size, np.int64)
    self.gather_equal(
      np.int64([part.size]).view(np.uint8),
      sizes.view(np.uint8),
      deadline,
      moving=False,
    )
    parts = np.empty(int(sizes.sum()), np.uint8)
    self.gather(part, parts, sizes.tolist(), deadline)
    pieces = np.split(parts, np.cumsum(sizes)[:-1])
    return [json.loads(piece.tobytes()) for piece in pieces]

  def wait(
    self,
    request: Any,
    buffers: Sequence[np.ndarray],
    deadline: float,
    check: Callable[[], None] = lambda: None,
    moving: bool = True,
  ) -> None:
    """Waits for a request of MPI.

    Args:
      request: what to wait for.
      buffers: what it reads and writes.
      deadline: in seconds of the monotonic clock.
      check: raises if it is no use to wait any more.
      moving: whether all ranks are there, so that bytes are on their way.

    Raises:
      DeadlineError: it took longer.
    """
    test = request.Test
    if test():
      return
    try:
      start = time.monotonic()
      patience = _PATIENCE_MOVING if moving else _PATIENCE_WAITING
      while True:
        for _ in range(_YIELDS):
          _yield()
          if test():
            return
        check()
        now = time.monotonic()
        if now > deadline:
          raise DeadlineError
        if now - start > patience:
          time.sleep(_SLEEP_SECONDS)
    except BaseException:
      # Collectives cannot be cancelled: MPI may still use this memory.
      _left.append((request, buffers))
      raise

  def _check_counts(self, *arrays: np.ndarray) -> None:
    # Before version 4 lengths in MPI are 32-bit integers.
    largest = max(array.nbytes for array in arrays)
    if largest >= 1 << 31 and self._mpi.Get_version() < (4, 0):
      raise errors.UnsupportedOptionError(
        f'{largest} bytes at once with MPI {self._mpi.Get_version()}',
        'less than 2 GiB, or an MPI library of version 4',
        'pass smaller arrays',
      )


# Requests that MPI still works on, with their memory.
_left: list[tuple[Any, Sequence[np.ndarray]]] = []


def _finalize(mpi: Any) -> None:
  """Ends MPI, or the process where MPI waits for a rank that is gone.

  Without unfinished requests mpi4py does it, and may wait for slower ranks.
  """
  if not _left or mpi.Is_finalized():
    return
  sys.stdout.flush()
  sys.stderr.flush()
  # MPI holds Python's lock meanwhile, so a thread of Python could not watch.
  # mpiexec sees the status and ends the other processes.
  faulthandler.dump_traceback_later(_FINALIZE_SECONDS, exit=True, file=2)
  mpi.Finalize()
  faulthandler.cancel_dump_traceback_later()


def _starts(sizes: Sequence[int]) -> list[int]:
  starts, end = [], 0
  for size in sizes:
    starts.append(end)
    end += size
  return starts
