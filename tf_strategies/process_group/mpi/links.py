"""Moves bytes over MPI, without waits that could hang.

MPI's blocking calls spin, and nothing wakes them. With more ranks than cores they take
the CPU from the ranks for which they wait, and after a peer stops they never return. So
every call here is non-blocking. A loop tests it, yields, looks at the clock and notices
that the group has failed.
"""

import atexit
import collections
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_strategies import errors, option_checks
from tf_strategies.process_group import execution as execution_lib

# Time for which a wait only yields before it sleeps: for late ranks, and for bytes,
# which move in shared memory only while MPI is called.
_PATIENCE_WAITING = 0.001
_PATIENCE_MOVING = 0.1
_SLEEP_SECONDS = 0.0001
# Looks at the clock after this many yields: a microsecond each or less.
_YIELDS = 16
_FINALIZE_SECONDS = 10.0
# Size of a value that ranks tell each other as they form a group.
_TEXT_BYTES = 1024
# Number of messages under way between two ranks in one direction.
_UNDER_WAY = 2


def load() -> Any:
  """Returns the module `mpi4py.MPI`. The first import initialises MPI.

  Raises:
    UnsupportedOptionError: mpi4py is missing, MPI is already finalized, or it
      forbids calls from several threads.
  """
  try:
    from mpi4py import MPI
  except (ImportError, RuntimeError) as e:
    raise errors.UnsupportedOptionError(
      f'one without them ({e})',
      'an environment with mpi4py and an MPI library',
      "in the checkout run: pip install '.[mpi]'; or use the group over TCP",
    ) from e
  option_checks.check(
    not MPI.Is_finalized(),
    'a process group after MPI.Finalize()',
    'MPI that is still running',
    'form the group before MPI.Finalize()',
  )
  if not MPI.Is_initialized():
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
  option_checks.check(
    MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    f'thread level {MPI.Query_thread()}',
    f'MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE})',
    "leave mpi4py.rc.thread_level at 'multiple', or use an MPI library "
    'that was built with it. Collectives run in threads of their own',
  )
  # Once, and before any group's own handler, which then runs earlier.
  atexit.unregister(_finalize)
  atexit.register(_finalize, MPI)
  return MPI


class MpiLinks:
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

  def gather_equal(self, part: np.ndarray, *how: Any) -> np.ndarray:
    """Brings an array of every rank, of equal shapes, to every rank.

    Args:
      part: array of this rank.
      *how: the deadline and the check of `wait`.

    Returns:
      An array with a row for each rank.
    """
    parts = np.empty((self.size, *part.shape), part.dtype)
    self.wait(self._comm.Iallgather(part, parts), (part, parts), *how)
    return parts

  def run(
    self,
    execution: execution_lib.Execution,
    deadline: float,
    check: Callable[[], None],
  ) -> None:
    """Runs a plan, at the same time as all other ranks.

    Args:
      execution: the run of this rank.
      deadline: time of the monotonic clock, in seconds.
      check: function that raises if waiting has become useless.

    Raises:
      DeadlineError: the deadline has passed.
    """
    run = _MpiRun(self._mpi, self._comm, execution)
    try:
      _wait(run.work, deadline, check, _PATIENCE_MOVING)
    except execution_lib.DeadlineError:
      raise execution_lib.DeadlineError(run.waiting()) from None
    finally:
      if run.requests:
        # They cannot be cancelled for sure: MPI may still use this memory.
        _left.append(run)

  def gather_values(self, value: Any, deadline: float) -> list[Any]:
    """Brings a short value of every rank, as JSON can say it, to every rank.

    Raises:
      DeadlineError: a rank did not come in time.
    """
    text = json.dumps(value).encode().ljust(_TEXT_BYTES)
    texts = self.gather_equal(np.frombuffer(text, np.uint8), deadline)
    return [json.loads(row.tobytes()) for row in texts]

  def wait(
    self,
    request: Any,
    buffers: Sequence[np.ndarray],
    deadline: float,
    check: Callable[[], None] = lambda: None,
  ) -> None:
    """Waits for a request of MPI, which is over once all ranks have arrived.

    Args:
      request: the request of MPI.
      buffers: arrays that it reads and writes.
      deadline: time of the monotonic clock, in seconds.
      check: function that raises if waiting has become useless.

    Raises:
      DeadlineError: it took longer.
    """
    try:
      _wait(request.Test, deadline, check, _PATIENCE_WAITING)
    except BaseException:
      # Collectives cannot be cancelled: MPI may still use this memory.
      _left.append((request, buffers))
      raise


def _wait(
  test: Callable[[], bool],
  deadline: float,
  check: Callable[[], None],
  patience: float,
) -> None:
  """Calls `test` until it is true; yields, and sleeps after `patience`."""
  if test():
    return
  start = time.monotonic()
  while True:
    for _ in range(_YIELDS):
      os.sched_yield()
      if test():
        return
    check()
    now = time.monotonic()
    if now > deadline:
      raise execution_lib.DeadlineError
    if now - start > patience:
      time.sleep(_SLEEP_SECONDS)


class _MpiRun:
  """A plan whose pieces are messages of MPI.

  Messages between two ranks arrive in the order in which they were sent, which
  is the plan's. Some are under way at a time, in each direction.
  """

  def __init__(self, mpi: Any, comm: Any, execution: execution_lib.Execution):
    self._mpi, self._comm = mpi, comm
    self._execution = execution
    execution.wake = self._wake
    # For each direction and peer: the pieces that wait, and how many are under way.
    self._waiting = {
      (is_send, peer): collections.deque(numbers)
      for is_send, links in (
        (False, execution.plan.receives),
        (True, execution.plan.sends),
      )
      for peer, numbers in links.items()
    }
    self._under_way: collections.Counter[tuple[bool, int]] = (
      collections.Counter()
    )
    self.requests: list[Any] = []
    # For each request: is it a send, the peer, the piece.
    self._about: list[tuple[bool, int, int]] = []
    for link in self._waiting:
      self._post(*link)

  def work(self) -> bool:
    """Does the work that is possible now. Returns whether everything is done."""
    execution = self._execution
    while execution.remaining:
      done = self._mpi.Request.Testsome(self.requests) if self.requests else ()
      for index in sorted(done or (), reverse=True):
        self.requests.pop(index)
        self._finish(*self._about.pop(index))
      if not done:
        return False
    return True

  def waiting(self) -> list[int]:
    """Returns the ranks whose messages, or whose readiness, are missing."""
    return sorted({peer for _, peer, _ in self._about})

  def _finish(self, is_send, peer, number) -> None:
    self._under_way[is_send, peer] -= 1
    take = self._execution.done if is_send else self._execution.receive
    take(number)
    self._post(is_send, peer)

  def _wake(self, number: int) -> None:
    self._post(True, self._execution.plan.pieces[number].peer)

  def _post(self, is_send, peer) -> None:
    """Starts the next messages from or to a rank."""
    link = is_send, peer
    waiting = self._waiting.get(link)
    while waiting and self._under_way[link] < _UNDER_WAY:
      if is_send and self._execution.needs[waiting[0]]:
        return
      number = waiting.popleft()
      if is_send:
        start, memory = self._comm.Isend, self._execution.memory(number)
      else:
        start, memory = self._comm.Irecv, self._execution.target(number)
      self.requests.append(start(memory, peer))
      self._about.append((*link, number))
      self._under_way[link] += 1


# Requests that MPI still works on, with their memory.
_left: list[Any] = []


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
