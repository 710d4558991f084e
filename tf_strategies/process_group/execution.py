"""Computes the sums of a plan in memory, and encodes and decodes.

TCP or MPI moves the bytes. It asks for the memory of a piece, says when the piece has
moved, and learns which pieces can move next.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import numpy as np

from tf_strategies.collectives import codec as codec_lib
from tf_strategies.collectives import codecs
from tf_strategies.process_group import buffers
from tf_strategies.process_group import plan as plan_lib


class LinkClosedError(OSError):
  """A data link has ended, or cannot be made; internal to `process_group`."""

  def __init__(self, rank: int, why: str = 'its data link is closed'):
    super().__init__(f'rank {rank} is gone: {why}')
    self.rank, self.why = rank, why


class MismatchError(Exception):
  """A peer is at another collective; internal to `process_group`."""

  def __init__(self, rank: int):
    super().__init__(f'rank {rank} is at another collective')
    self.rank = rank


class DeadlineError(Exception):
  """A collective took too long; internal to `process_group`."""

  def __init__(self, waiting: Sequence[int] = ()):
    super().__init__(f'waiting for ranks {waiting}')
    self.waiting = tuple(waiting)


class Execution:
  """One run of a plan on the arrays of one rank.

  Args:
    plan: the plan of this rank.
    array: this rank's contribution, flat and contiguous.
    out: the array for the result, like `array`. If the plan only moves bytes, its
      length may differ.
    pool: source of the memory that the plan needs.
    form: the format in which elements travel and are added.
    ufunc: function that combines two arrays.
  """

  def __init__(
    self,
    plan: plan_lib.RankPlan,
    array: np.ndarray,
    out: np.ndarray,
    pool: buffers.Pool,
    form: plan_lib.Format = plan_lib.BYTES,
    ufunc: np.ufunc = np.add,
  ):
    self.plan = plan
    self.needs = list(plan.needs)
    self.remaining = len(plan.pieces)
    self._form, self._ufunc = form, ufunc
    self._pool = pool
    self._is_coded = form.codec is not codecs.NONE
    values = out
    if form.is_wide:
      values = pool.take(array.shape, codec_lib.sum_dtype(array.dtype))
    self._values = values
    self._arrays = {
      plan_lib.ARRAY: array,
      plan_lib.OUT: out,
      plan_lib.VALUES: values,
    }
    wire = out
    if self._is_coded and not form.is_payload:
      wire = pool.take(plan.wire_bytes, np.uint8)
    self._bytes = {
      plan_lib.ARRAY: array.view(np.uint8),
      plan_lib.OUT: out.view(np.uint8),
      plan_lib.WIRE: wire.view(np.uint8),
    }
    # Received terms of sums, and pieces whose place is still in use.
    self._received: dict[int, np.ndarray] = {}
    self._early: dict[int, np.ndarray] = {}
    # Local pieces that are not urgent.
    self._later = collections.deque(
      number
      for number, piece in enumerate(plan.pieces)
      if piece.peer < 0 and not plan.needs[number]
    )

  def memory(self, number: int) -> np.ndarray:
    """Returns the bytes of a piece, to send or to receive into."""
    piece = self.plan.pieces[number]
    return self._bytes[piece.buffer][piece.start : piece.stop]

  def target(self, number: int) -> tuple[np.ndarray, bool]:
    """Returns memory to receive a piece into, and whether that is its own place.

    The terms of a sum have no other place. The own place of a piece may still be in use.
    """
    piece = self.plan.pieces[number]
    if piece.buffer != plan_lib.RECEIVED and not self.needs[number]:
      return self.memory(number), True
    return self._pool.take(piece.stop - piece.start, np.uint8), False

  def is_early(self, number: int) -> bool:
    """Returns whether a piece has come and waits for others."""
    return number in self._early

  def receive(
    self,
    number: int,
    received: np.ndarray | None,
    wake: Callable[[int], None],
  ) -> None:
    """Takes a piece that has arrived, or keeps it until the pieces before are done.

    Args:
      number: number of the piece.
      received: bytes of the piece; None if they are in `memory` already.
      wake: called for each piece that may move now, and for each kept piece.
    """
    if self.needs[number]:
      self._early[number] = received
      return
    if self.plan.pieces[number].buffer == plan_lib.RECEIVED:
      self._received[number] = received
    elif received is not None:
      self.memory(number)[:] = received
    self.done(number, wake)

  def done(self, number: int, wake: Callable[[int], None]) -> None:
    """Releases the pieces that waited for one, and computes those that are ready."""
    self.remaining -= 1
    for other in self.plan.unlocks[number]:
      self.needs[other] -= 1
      if self.needs[other]:
        continue
      piece = self.plan.pieces[other]
      if piece.peer >= 0:
        if other in self._early:
          self.receive(other, self._early.pop(other), wake)
        wake(other)
      elif piece.kind == plan_lib.DECODE:
        self._later.append(other)
      else:
        self._compute(piece)
        self.done(other, wake)

  def compute_next(self, wake: Callable[[int], None]) -> bool:
    """Computes a piece while nothing can move. Returns whether there was one."""
    if not self._later:
      return False
    number = self._later.popleft()
    self._compute(self.plan.pieces[number])
    self.done(number, wake)
    return True

  def _compute(self, piece: plan_lib.PlannedPiece) -> None:
    if piece.kind == plan_lib.COMBINE:
      self._combine(piece)
      return
    codec = self._form.codec
    payload = self._bytes[piece.buffer][piece.start : piece.stop]
    array = self._arrays[piece.terms[0][0]][piece.first : piece.last]
    is_wide = array.dtype != codec_lib.sum_dtype(array.dtype)
    if piece.kind == plan_lib.DECODE:
      values = np.empty(array.shape, np.float32) if is_wide else array
      codec.decode(payload, values)
      if is_wide:
        np.copyto(array, values, casting='unsafe')
      return
    if is_wide:
      array = array.astype(np.float32)
    codec.encode(array, payload)

  def _combine(self, piece: plan_lib.PlannedPiece) -> None:
    """Combines a piece's terms, in their order, into the sum of that stretch."""
    target = total = self._values[piece.first : piece.last]
    own = plan_lib.VALUES if self._form.is_wide else plan_lib.OUT
    overwrites = any(buffer == own for buffer, _ in piece.terms[2:])
    if overwrites:
      # The target holds a term that is read after the first sum.
      total = self._pool.take(target.shape, target.dtype)
    so_far = self._term(piece, 0)
    for index in range(1, len(piece.terms)):
      self._ufunc(so_far, self._term(piece, index), out=total)
      so_far = total
    if overwrites:
      np.copyto(target, total)

  def _term(self, piece: plan_lib.PlannedPiece, index: int) -> np.ndarray:
    """Returns the values of a term. Its memory is free afterwards if it was received."""
    buffer, start = piece.terms[index]
    length = piece.last - piece.first
    if buffer in self._arrays and not (
      buffer == plan_lib.ARRAY and self._form.is_payload
    ):
      return self._arrays[buffer][piece.first : piece.last]
    if buffer != plan_lib.RECEIVED:
      end = start + self._form.codec.payload_bytes(length)
      memory = self._bytes[buffer][start:end]
    else:
      memory = self._received.pop(start)
      if not self._is_coded:
        return memory.view(self._values.dtype)
    values = self._pool.take(length, self._values.dtype)
    self._form.codec.decode(memory, values)
    return values
