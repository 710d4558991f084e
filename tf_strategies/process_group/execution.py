"""Computes the sums of a plan in memory.

TCP or MPI moves the bytes. It asks for the memory of a piece, says when the piece has
moved, and learns which pieces can move next.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from tf_strategies.process_group import buffers, reductions
from tf_strategies.process_group import plan as plan_lib


class LinkClosedError(OSError):
  """A data link has ended, or cannot be made; internal to `process_group`."""

  def __init__(self, rank: int, why: str = 'its data link is closed'):
    super().__init__(f'rank {rank} is gone: {why}')
    self.rank, self.why = rank, why


class MismatchError(Exception):
  """A peer is at another collective; internal to `process_group`."""

  def __init__(self, rank: int):
    self.rank = rank


class DeadlineError(Exception):
  """A collective took too long; internal to `process_group`."""

  def __init__(self, waiting: Sequence[int] = ()):
    self.waiting = tuple(waiting)


class Execution:
  """One run of a plan on the arrays of one rank.

  Args:
    plan: the plan of this rank.
    array: this rank's contribution, flat and contiguous.
    out: the array for the result, like `array`. If the plan only moves bytes, its
      length may differ.
    pool: source of the memory that the plan needs.

  Attributes:
    wake: called for each piece that may move now, and for each piece that came too early;
      set by what moves the pieces.
    early: the pieces that have come while their place was still in use.
  """

  def __init__(
    self,
    plan: plan_lib.RankPlan,
    array: np.ndarray,
    out: np.ndarray,
    pool: buffers.Pool,
  ):
    self.plan = plan
    self.needs = list(plan.needs)
    self.remaining = len(plan.pieces)
    self._pool = pool
    self.wake: Callable[[int], None]
    self._dtype = array.dtype
    self._sum_dtype = reductions.sum_dtype(array.dtype)
    self._buffers = {
      plan_lib.ARRAY: array.view(np.uint8),
      plan_lib.OUT: out.view(np.uint8),
    }
    # Memory of pieces that were not received into their own place.
    self._received: dict[int, np.ndarray] = {}
    self.early: set[int] = set()

  def memory(self, number: int) -> np.ndarray:
    """Returns the bytes of a piece, to send or to receive into."""
    piece = self.plan.pieces[number]
    return self._buffers[piece.buffer][piece.start : piece.stop]

  def target(self, number: int) -> np.ndarray:
    """Returns memory to receive a piece into.

    The terms of a sum have no place of their own. The place of another piece may still
    be in use.
    """
    piece = self.plan.pieces[number]
    if piece.buffer != plan_lib.RECEIVED and not self.needs[number]:
      return self.memory(number)
    self._received[number] = self._pool.take(piece.size, np.uint8)
    return self._received[number]

  def receive(self, number: int) -> None:
    """Takes a piece that is in its `target`, or keeps it until those before are done."""
    if self.needs[number]:
      self.early.add(number)
      return
    is_term = self.plan.pieces[number].buffer == plan_lib.RECEIVED
    if number in self._received and not is_term:
      self.memory(number)[:] = self._received.pop(number)
    self.done(number)

  def done(self, number: int) -> None:
    """Releases the pieces that waited for one, and computes those that are ready."""
    self.remaining -= 1
    for other in self.plan.unlocks[number]:
      self.needs[other] -= 1
      if self.needs[other]:
        continue
      piece = self.plan.pieces[other]
      if piece.terms:
        self._combine(piece)
        self.done(other)
        continue
      if other in self.early:
        self.early.remove(other)
        self.receive(other)
      self.wake(other)

  def _combine(self, piece: plan_lib.PlannedPiece) -> None:
    """Combines a piece's terms, in their order, into the sum of that stretch."""

    def values(buffer):
      memory = self._buffers[buffer][piece.start : piece.stop]
      return memory.view(self._dtype)

    terms = [
      values(piece.buffer)
      if number == plan_lib.OWN
      else self._received.pop(number).view(self._dtype)
      for number in piece.terms
    ]
    total = target = values(plan_lib.OUT)
    # The target may hold a term that is read after the first sum.
    overwrites = (
      piece.buffer == plan_lib.OUT and plan_lib.OWN in piece.terms[2:]
    )
    if overwrites or self._sum_dtype != self._dtype:
      total = self._pool.take(target.shape, self._sum_dtype)
    # The result shows an overflow: it is infinite.
    with np.errstate(over='ignore', invalid='ignore'):
      functools.reduce(
        functools.partial(np.add, out=total, dtype=total.dtype), terms
      )
      if total is not target:
        np.copyto(target, total, casting='unsafe')
