"""What the threads of one group share: where it is, and whether it failed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tf_strategies import errors
from tf_strategies.process_group import group

# Descriptions of the last collectives: a rank that is ahead by one or two can
# still say what it did where another got stuck.
_REMEMBERED = 4

_ERRORS: Mapping[str, type[errors.Error]] = {
  error.__name__: error
  for error in (
    errors.WorkerUnavailableError,
    errors.CollectiveTimeoutError,
    errors.CollectiveMismatchError,
  )
}


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Why a group failed, in a form that travels.

  Attributes:
    error: the name of the error's class.
    message: what it says.
    rank: the one that is to blame, where there is one.
    address: of that rank.
    tensor: name of what was moved.
    step: the sequence number of the collective.
    ranks: those that differ from the lowest rank.
  """

  error: str
  message: str
  rank: int | None = None
  address: str | None = None
  tensor: str | None = None
  step: int | None = None
  ranks: tuple[int, ...] = ()

  def to_json(self) -> dict[str, Any]:
    """As a dictionary that JSON can say."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> Verdict:
    """The inverse of `to_json`."""
    return cls(**{**value, 'ranks': tuple(value['ranks'])})

  def exception(self) -> errors.Error:
    """A new exception: each caller that raises it gets its own traceback."""
    error = _ERRORS[self.error](self.message)
    for name in ('rank', 'address', 'tensor', 'step'):
      setattr(error, name, getattr(self, name))
    error.ranks = self.ranks
    return error


@dataclasses.dataclass(frozen=True)
class Operation:
  """A collective, as messages tell it.

  Attributes:
    sequence: its number, from 1; 0 before the first.
    text: kind, name, dtype and size.
    name: of the tensor.
    busy: whether it is still going on.
    since: when it began, in seconds of the monotonic clock.
  """

  sequence: int = 0
  text: str = 'nothing yet'
  name: str = ''
  busy: bool = False
  since: float = 0.0

  def __str__(self):
    return f'{self.text} (sequence {self.sequence})'


class GroupState:
  """Shared by the thread of the collectives and the control plane's.

  Args:
    members: everyone in the group.
    rank: this process.
    generation: of the group.
  """

  def __init__(
    self, members: Sequence[group.Member], rank: int, generation: int
  ):
    self.members = tuple(members)
    self.rank = rank
    self.generation = generation
    self.operation = Operation()
    # What the program says of itself, the step that it is at, say.
    self.note = ''
    # Tag -> when this rank came to it.
    self._exchanges: dict[str, float] = {}
    self.verdict: Verdict | None = None
    self.failed = threading.Event()
    # Rank -> the last collective that it took part in before it left.
    self.departed: dict[int, int] = {}
    self._recent: collections.OrderedDict[int, str] = collections.OrderedDict()
    self._lock = threading.Lock()
    self._on_failure: list[Callable[[], None]] = []

  def on_failure(self, callback: Callable[[], None]) -> None:
    """Calls back once the group fails, from whichever thread notices."""
    with self._lock:
      if self.verdict is None:
        self._on_failure.append(callback)
        return
    callback()

  def fail(self, verdict: Verdict) -> bool:
    """Makes the group fail; False if it had failed before."""
    with self._lock:
      if self.verdict is not None:
        return False
      self.verdict = verdict
      callbacks, self._on_failure = self._on_failure, []
    self.failed.set()
    for callback in callbacks:
      callback()
    return True

  def check(self) -> None:
    """Raises what the group failed with, if it did."""
    if self.verdict is not None:
      raise self.verdict.exception()

  def begin(self, text: str, name: str) -> Operation:
    """Notes that the next collective begins."""
    operation = Operation(
      self.operation.sequence + 1, text, name, True, time.monotonic()
    )
    self._recent[operation.sequence] = text
    while len(self._recent) > _REMEMBERED:
      self._recent.popitem(last=False)
    self.operation = operation
    return operation

  def end(self) -> None:
    """Notes that the collective is over."""
    self.operation = dataclasses.replace(self.operation, busy=False)

  @contextlib.contextmanager
  def exchanging(self, tag: str) -> Iterator[None]:
    """Context in which this rank waits for an exchange."""
    self._exchanges[tag] = time.monotonic()
    try:
      yield
    finally:
      self._exchanges.pop(tag, None)

  def describe(self) -> dict[str, Any]:
    """What this rank is at, in a form that travels."""
    operation, now = self.operation, time.monotonic()
    return {
      'sequence': operation.sequence,
      'busy': operation.busy,
      'name': operation.name,
      'text': operation.text,
      'seconds': now - operation.since if operation.busy else 0.0,
      'exchanges': {t: now - s for t, s in list(self._exchanges.items())},
      'note': self.note,
      'recent': {str(k): v for k, v in list(self._recent.items())},
    }

  def left(self, rank: int) -> Verdict:
    """The verdict on a rank that said goodbye and is still needed."""
    return self.lost(
      rank,
      'left the group',
      'It closed its group while others still used theirs: all ranks must '
      'run the same number of collectives.',
    )

  def lost(self, rank: int, how: str, cause: str = '') -> Verdict:
    """The verdict on a rank that is not there any more.

    Args:
      rank: that rank.
      how: the end of a sentence that begins with the rank.
      cause: what follows, as whole sentences.
    """
    operation = self.operation
    at = f' during {operation}' if operation.busy else f' after {operation}'
    member = self.members[rank]
    return Verdict(
      'WorkerUnavailableError',
      f'R{str(member)[1:]} {how}{at}. '
      + (cause or 'Look at its log; then form the group again or restart.'),
      rank=rank,
      address=member.address,
      tensor=operation.name or None,
      step=operation.sequence,
    )
