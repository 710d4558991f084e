"""Holds the state that the threads of a group share: members, position, failure."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tf_strategies import errors

# A rank that is ahead by one or two collectives can still describe its call of the
# collective in which another rank is stuck.
_REMEMBERED = 4


class Member(NamedTuple):
  """One process of a group.

  Attributes:
    rank: rank in the group, from 0.
    task: number of the task in the cluster. It stays when groups form again.
    address: address of the process, 'host:port'.
    progress: progress that the process passed to `form`.
    incarnation: of the task: it tells a restarted process from its predecessor.
  """

  rank: int
  task: int
  address: str
  progress: int = 0
  incarnation: str = ''

  def __str__(self):
    return f'rank {self.rank} (task {self.task} at {self.address})'


class FailureReport(NamedTuple):
  """Why a group failed, in a form that travels.

  The exception is of the class `error` of `errors`, and the fields after `message` become its
  attributes. JSON makes a list of `ranks`.
  """

  error: str
  message: str
  rank: int | None = None
  address: str | None = None
  tensor: str | None = None
  step: int | None = None
  ranks: Sequence[int] = ()

  def exception(self) -> errors.Error:
    """Returns a new exception, so that each caller gets its own traceback."""
    error = getattr(errors, self.error)(self.message)
    for name in ('rank', 'address', 'tensor', 'step'):
      setattr(error, name, getattr(self, name))
    error.ranks = tuple(self.ranks)
    return error


CLOSED = FailureReport(
  'WorkerUnavailableError',
  'This process has closed its group. Fix: form a new one.',
)


class Operation(NamedTuple):
  """A collective, as messages describe it."""

  sequence: int = 0  # From 1; 0 before the first.
  text: str = 'nothing yet'
  name: str = ''  # Of the tensor.
  busy: bool = False  # Whether it is still running.

  def __str__(self):
    return f'{self.text} (sequence {self.sequence})'


class GroupState:
  """Shared by the thread of the collectives and the control plane's."""

  def __init__(self, members: Sequence[Member], rank: int, generation: int):
    self.members = tuple(members)
    self.rank = rank
    self.generation = generation
    self.operation = Operation()  # The newest collective.
    # Why the group has ended; `CLOSED` if this process has left it.
    self.failure: FailureReport | None = None
    self.failed = threading.Event()
    # The last collective of each rank that has left, in the order of leaving.
    self.departed: dict[int, int] = {}
    self.ended: set[int] = set()  # Ranks whose programs have ended.
    # Names the method of a model that this rank is in; '' for none.
    self.running_call: Callable[[], str] = str
    # The open exchanges of this rank by tag.
    self.exchanges: dict[str, concurrent.futures.Future] = {}
    self._recent: collections.deque[tuple[int, str]] = collections.deque(
      maxlen=_REMEMBERED
    )
    self._lock = threading.Lock()
    self._on_failure: list[Callable[[], None]] = []

  def on_failure(self, callback: Callable[[], None]) -> None:
    """Calls back once the group fails, from whichever thread notices.

    Called while the group is made, when nothing can have failed.
    """
    self._on_failure.append(callback)

  def fail(self, report: FailureReport) -> None:
    """Makes the group fail, if it has not failed before."""
    with self._lock:
      if self.failure is not None:
        return
      self.failure = report
    self.failed.set()
    for callback in self._on_failure:
      callback()

  def check(self) -> None:
    """Raises the error of a failed group."""
    if self.failure is not None:
      raise self.failure.exception()

  def begin(self, text: str, name: str) -> Operation:
    """Notes that the next collective begins."""
    operation = Operation(self.operation.sequence + 1, text, name, True)
    self._recent.append((operation.sequence, text))
    self.operation = operation
    return operation

  def end(self) -> None:
    """Notes that the collective is over."""
    self.operation = self.operation._replace(busy=False)

  def describe(self) -> dict[str, Any]:
    """Returns the activity of this rank, for a message."""
    operation = self.operation
    return {
      'sequence': operation.sequence,
      'busy': operation.busy,
      'name': operation.name,
      'exchanges': sorted(self.exchanges.copy()),
      'call': self.running_call(),
      'recent': {str(k): v for k, v in list(self._recent)},
    }

  def missed(self) -> FailureReport | None:
    """Returns the report on the first rank that left before the running collective."""
    operation = self.operation
    for rank, last in list(self.departed.items()):
      # Its earlier messages are still on their way.
      if operation.busy and last < operation.sequence:
        return self.left(rank)
    return None

  def left(self, rank: int) -> FailureReport:
    """Returns the report on a rank that said goodbye and is still needed."""
    did = f'rank {rank} has closed its group'
    if rank in self.ended:
      did = f"rank {rank}'s program has ended"
    call = self.running_call()
    if call in ('evaluate', 'predict'):
      why = f' without calling {call}. Fix: call it on all workers.'
    elif call:
      why = (
        f' while others are in {call}. Fix: call it equally often on all '
        'workers, with the same data, epochs and callbacks.'
      )
    else:
      why = (
        ' while others use theirs. Fix: run the same number of steps and '
        'collectives on all ranks.'
      )
    return self.lost(rank, 'left the group', f': {did}{why}')

  def lost(
    self,
    rank: int,
    how: str,
    why: str = '. Fix: look at its log; then form the group again or restart.',
  ) -> FailureReport:
    """Returns the report on a lost rank: `how` it was lost, and the end of the sentence."""
    operation = self.operation
    when = 'during' if operation.busy else 'after'
    member = self.members[rank]
    return FailureReport(
      'WorkerUnavailableError',
      f'R{str(member)[1:]} {how} {when} {operation}{why}',
      member.rank,
      member.address,
      operation.name or None,
      operation.sequence,
    )
