"""Decides which workers form a group: the rendezvous as a state machine.

It has no sockets or clocks: messages and times are arguments.
"""

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tf_strategies import errors, version
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.rendezvous import quorum

# A worker counts as present for this long after it was reached.
FRESH_SECONDS = 3.0
# A worker that may lead gets this long for its first answer.
ANSWER_SECONDS = 2.0
# Number of possible leaders that the other tasks ask.
CANDIDATES = 3
# Largest number of characters about missing workers in a message.
_MOST_TEXT = 2000
# The fields that a `View` copies from a message.
_TOLD = 'incarnation', 'generation', 'progress', 'size', 'leader', 'missing'


class Activity(str, enum.Enum):
  """What a process is doing."""

  IDLE = 'idle'  # Between groups: nobody has called `form`.
  FORMING = 'forming'
  RUNNING = 'running'
  REFUSED = 'refused'  # It has found out that no group can ever form.


class Cut(NamedTuple):
  """A task to which a process could not connect.

  Attributes:
    task: its number.
    incarnation: of that task: a process that was started again may be reached.
    why: for messages.
    at: when.
  """

  task: int
  incarnation: str
  why: str
  at: float


@dataclasses.dataclass
class View:
  """The known state of another task."""

  incarnation: str = ''  # Tells a restarted process from its predecessor.
  state: Activity = Activity.IDLE  # Its last reported state.
  generation: int = 0  # Of its last group.
  progress: int = 0
  idle_since: float | None = None  # Since when it has been between groups.
  heard_at: float = -math.inf  # When it last reported that state.
  reached_at: float | None = None  # When it last answered at its address.
  problem: str = 'it was never reached'  # Why it does not answer.
  refused: bool = False  # Whether the problem is the secret.
  is_gone: bool = False  # Whether nobody listens at its address.
  was_tried: bool = False  # Whether it has answered, or not, since `start`.
  size: int = 0  # Of its last group, and the lowest task in it.
  leader: int = 0
  missing: str = ''  # Whom it waits for, if it leads.
  cuts: Sequence[Cut] = ()  # To whom it could not connect.

  def is_fresh(self, now: float) -> bool:
    """Returns whether it has answered just now."""
    return self.reached_at is not None and now - self.reached_at < FRESH_SECONDS


class MembershipTable:
  """The state of every task, and the decisions that follow from it."""

  def __init__(
    self,
    addresses: Mapping[int, str],
    task: int,
    incarnation: str,
    options: options_lib.GroupOptions,
  ):
    self.addresses = dict(sorted(addresses.items()))
    self.task = task
    self.incarnation = incarnation
    self.state = Activity.IDLE
    self.generation = 0
    self.progress = 0
    self.refusal = ''
    self.views = {t: View() for t in self.addresses if t != task}
    self._minimum = options.min_workers or len(self.addresses)
    self._needs_majority = self._minimum == options_lib.MAJORITY
    self._maximum = options.max_workers or len(self.addresses)
    self._window = options.window_seconds
    self._patience = options.heartbeat_timeout_seconds
    self._seated: Mapping[int, str] = {}
    self._highest_generation = 0  # That any task has seen.
    self._is_closed = False
    self._least = 1
    self.started_at = 0.0
    self._too_few_at = 0.0  # When there were last too few for a group.
    self._missing = ''
    self._cuts: dict[int, Cut] = {}
    self.failed_at = -math.inf  # When the last proposal of this process failed.

  def hello(
    self, now: float = 0.0, with_addresses: bool = True
  ) -> dict[str, Any]:
    """Returns what this process tells a peer.

    The addresses are in the first message of a connection only.
    """
    return {
      'task': self.task,
      'incarnation': self.incarnation,
      'version': version.__version__,
      'addresses': [*self.addresses.items()] if with_addresses else [],
      'state': self.state.value,
      'generation': self.generation,
      'progress': self.progress,
      'size': len(self._seated),
      'leader': min(self._seated, default=self.task),
      'missing': self._missing,
      'refusal': self.refusal,
      # Clocks differ between hosts, so the age of a cut travels.
      'cuts': [(*cut[:3], now - cut.at) for cut in self._cuts.values()],
    }

  def start(
    self,
    progress: int,
    is_closed: bool = False,
    may_be_alone: bool = True,
    now: float = 0.0,
  ) -> None:
    """Starts to form a group.

    Args:
      progress: progress of this process.
      is_closed: whether only members of the last group may take part.
      may_be_alone: whether this process may form a group of one.
      now: time of the monotonic clock, in seconds.
    """
    self.started_at = self._too_few_at = now
    self._is_closed = is_closed
    self._least = 1 if may_be_alone or len(self.addresses) == 1 else 2
    self.state = Activity.FORMING
    self.progress = progress
    self.refusal = ''
    self.views = {task: View() for task in self.views}

  def heard(
    self, message: Mapping[str, Any], now: float, reached: bool
  ) -> None:
    """Notes the `hello()` of a task, `reached` at its address or calling here.

    Raises:
      RendezvousError, ClusterConfigError: the two can never form a group.
    """
    task = message['task']
    self._check_same_job(message)
    view = self.views[task]
    # The process at the address counts, until it has been silent for a while.
    same = message['incarnation'] == view.incarnation
    if reached or same or not view.is_fresh(now):
      for name in _TOLD:
        setattr(view, name, message[name])
      view.state, view.heard_at = Activity(message['state']), now
      view.cuts = [Cut(*about, now - age) for *about, age in message['cuts']]
      if view.state is not Activity.IDLE:
        view.idle_since = None
      elif view.idle_since is None:
        view.idle_since = now
    generations = self._highest_generation, message['generation']
    self._highest_generation = max(generations)
    if reached:
      view.reached_at = now
      view.is_gone, view.was_tried = False, True
      view.problem = ''
      view.refused = False
    if message['refusal'] and self.state is Activity.FORMING:
      raise errors.RendezvousError(
        f'Task {task} at {self.addresses[task]} refuses to form a group: '
        f'{message["refusal"]}'
      )

  def _check_same_job(self, message) -> None:
    """Raises an error if a task has another version, other addresses or this number."""
    other, mine = message['task'], self.addresses
    if message['version'] != version.__version__:
      raise errors.RendezvousError(
        f'Expected tf_strategies {version.__version__} of task {self.task} '
        f'everywhere, got {message["version"]} on task {other}. Fix: install '
        'the same version everywhere.'
      )
    theirs = dict(message['addresses']) or mine
    differing = [
      f'task {t} is at {mine.get(t, "no address")} here and at '
      f'{theirs.get(t, "no address")} there'
      for t in sorted({*theirs, *mine})
      if theirs.get(t) != mine.get(t)
    ]
    if other not in self.views:
      differing.append(f'both claim to be task {other}')
    if differing:
      raise errors.ClusterConfigError(
        f'Task {self.task} ({self.incarnation}) and task {other} '
        f'({message["incarnation"]}) have different descriptions of the '
        f'cluster: {"; ".join(differing[:4])}. Fix: give all workers the same '
        'one, and each its own task.'
      )

  def lost(
    self,
    task: int,
    problem: str,
    refused: bool = False,
    is_gone: bool = False,
  ) -> None:
    """Notes that a task does not answer; it `is_gone` if nobody listens there."""
    view = self.views[task]
    view.is_gone, view.was_tried = is_gone, True
    if view.reached_at is not None and not refused:
      problem = f'it was there, then: {problem}'
    view.reached_at = None
    view.problem = problem
    view.refused = refused

  def polled(self, now: float) -> list[int]:
    """Returns the tasks whose state this task polls.

    The lowest live task leads and polls all others. The others poll the lowest few
    that answer, so with 1,000 workers most tasks talk to three others.
    """
    asked, answering, untried = self._ask_lower(now)
    return asked if answering or untried else list(self.views)

  def _ask_lower(self, now: float) -> tuple[list[int], int, int]:
    """Returns the lower tasks to ask, and how many of them answer or still may."""
    asked, answering, failed, untried = [], 0, 0, 0
    is_late = now - self.started_at > ANSWER_SECONDS
    for task, view in self.views.items():
      are_enough = answering + untried >= CANDIDATES + failed
      if task > self.task or answering >= CANDIDATES or are_enough:
        break
      asked.append(task)
      answers = view.is_fresh(now)
      has_failed = (view.was_tried or is_late) and not answers
      answering += answers
      failed += has_failed
      untried += not (answers or has_failed)
    return asked, answering, untried

  def formed(self, generation: int, seated: Mapping[int, str]) -> None:
    """Notes that a group of these tasks, in these incarnations, has formed."""
    self.state = Activity.RUNNING
    self.generation = generation
    self._seated = seated

  def joiners(self, now: float) -> tuple[int, ...]:
    """Returns the tasks that asked for a group in the last seconds and are in none.

    A task that a new group would leave out, as far as this one knows, is not among
    them.
    """
    return tuple(
      task
      for task, view in self.views.items()
      if view.state is Activity.FORMING
      and now - view.heard_at < FRESH_SECONDS
      and self._seated.get(task) != view.incarnation
      and task in self._connected({**self._seated, task: view.incarnation}, now)
    )

  def note_cut(self, task: int, *about: Any) -> None:
    """Notes that this process could not connect to a task; see `Cut`."""
    self._cuts[task] = Cut(task, *about)

  def _all_cuts(self) -> Iterator[tuple[int, Cut]]:
    """Yields the cuts that this process knows of, with the tasks that called."""
    # A copy: threads of users ask too.
    yield from ((self.task, cut) for cut in list(self._cuts.values()))
    for task, view in self.views.items():
      yield from ((task, cut) for cut in view.cuts)

  def _connected(
    self,
    lives: Mapping[int, str],
    now: float,
    seconds: float = quorum.CUT_SECONDS,
  ) -> list[int]:
    """Returns those of some tasks that can all connect to each other, in order."""
    pairs = [
      (caller, cut.task)
      for caller, cut in self._all_cuts()
      if now - cut.at < seconds and cut.incarnation == lives.get(cut.task)
    ]
    return quorum.leave_out(sorted(lives), pairs, self.task)

  def rival_group(self, now: float) -> int | None:
    """Returns a task of another group to which this group has to give way, or None.

    Two groups of a job exist if `min_workers` allowed both sides of a cut to go on. The
    group of the lower generation gives way, then the one with fewer workers, then the
    one whose lowest task is higher. So a member of an earlier group of this process that
    has not yet heard of its end is no rival.
    """
    mine = self.generation, len(self._seated), -min(self._seated)
    for task in self.sees_running(now):
      view = self.views[task]
      if (view.generation, view.size, -view.leader) > mine:
        return task
    return None

  def all_refuse(self, now: float) -> bool:
    """Returns whether every worker that was asked was found to have another secret."""
    asked = self.polled(now)
    return bool(asked) and all(self.views[t].refused for t in asked)

  def next_generation(self) -> int:
    """Returns a number above every generation that any task has seen."""
    return max(self.generation, self._highest_generation) + 1

  def proposal(self, now: float) -> list[state_lib.Member] | None:
    """Returns the members to propose now; None if this process should not propose one."""
    fresh = {t: v for t, v in self.views.items() if v.is_fresh(now)}
    lives = {self.task: self.incarnation}
    lives |= {
      t: v.incarnation
      for t, v in fresh.items()
      if v.state is Activity.FORMING
      and (not self._is_closed or self._seated.get(t) == v.incarnation)
    }
    _, answering, untried = self._ask_lower(now)
    # A lower task leads, or may be there; or a group runs, which will form again; or a
    # worker has just left one, perhaps with the only state that there is.
    waits = untried > 0 or any(
      (v.state is Activity.FORMING and t < self.task)
      or v.state is Activity.RUNNING
      or (v.idle_since is not None and now - v.idle_since < self._patience)
      for t, v in fresh.items()
    )
    leads = not (answering or untried)
    self._missing = self.missing(now)[:_MOST_TEXT] if leads else ''
    for seconds in (quorum.CUT_SECONDS, quorum.RETRY_SECONDS):
      there = self._connected(lives, now, seconds)
      members = [self._member(*place) for place in enumerate(there)]
      are_enough = self._are_enough(members)
      if are_enough:
        break
    if waits or not are_enough:
      self._too_few_at = now
      return None
    may_be_more = len(there) < self._maximum and not self._all_left_are(there)
    if may_be_more and now - self._too_few_at < self._window:
      return None
    others = (self.views[t] for t in there if t != self.task)
    if any(view.reached_at <= self.failed_at for view in others):
      return None  # It may tell why the last proposal failed.
    return members[: self._maximum]

  def _are_enough(
    self, members: Sequence[state_lib.Member], gone: Sequence[int] = ()
  ) -> bool:
    """Returns whether these may go on as a group, when others are `gone`."""
    there = [member.task for member in members]
    if len(there) < self._least:
      return False
    if not self._needs_majority:
      return len(there) >= self._minimum
    if not self._seated:
      # A former member knows whether its group may go on, and objects if not.
      were_in_one = any(self.views[t].size for t in there if t != self.task)
      return were_in_one or 2 * len(there) > len(self.addresses)
    present = [
      m.task for m in members if self._seated.get(m.task) == m.incarnation
    ]
    return quorum.has_quorum(
      present, there, [*gone, *self.gone()], self._seated, self.addresses
    )

  def sees_running(self, now: float) -> list[int]:
    """Returns the tasks that are known to be in a group now."""
    return [
      task
      for task, view in self.views.items()
      if view.is_fresh(now) and view.state is Activity.RUNNING
    ]

  def _all_left_are(self, there: Sequence[int]) -> bool:
    """Returns whether all of the last group are there but those that surely have died."""
    others = [t for t in self._seated if t != self.task]
    return bool(others) and all(
      t in there or self.views[t].is_gone for t in others
    )

  def gone(self) -> list[int]:
    """Returns the tasks that have certainly died."""
    return [task for task, view in self.views.items() if view.is_gone]

  def objection(
    self,
    generation: int,
    members: Sequence[state_lib.Member],
    gone: Sequence[int] = (),
  ) -> str:
    """Returns why this process cannot accept a proposal; empty if it can.

    The leader asks all tasks. `gone` are the tasks that it knows to have died.
    """
    if self.state is not Activity.FORMING:
      return f'it is {self.state.value}'
    if generation <= self.generation:
      return f'generation {generation} is over'
    mine = self.task, self.progress, self.incarnation
    if mine not in [(m.task, m.progress, m.incarnation) for m in members]:
      return 'the seat is for another incarnation'
    # A task that was in no group knows less than the leader and the former members.
    must_agree = self._needs_majority and self._seated
    if must_agree and not self._are_enough(members, gone):
      return 'a majority of its last group is not there'
    return ''

  def _member(self, rank: int, task: int) -> state_lib.Member:
    view = self if task == self.task else self.views[task]
    about = self.addresses[task], view.progress, view.incarnation
    return state_lib.Member(rank, task, *about)

  def missing(self, now: float) -> str:
    """Returns a text of the missing tasks, with their addresses and the reasons."""
    told, by_another = [], ''
    # The task that asked all may have given up just before this process does.
    last_told = next((v.missing for v in self.views.values() if v.missing), '')
    for task in self.polled(now):
      view = self.views[task]
      if view.is_fresh(now) and view.missing:
        return view.missing  # It asks all.
      if last_told and not view.was_tried:
        by_another = last_told
        continue
      where = f'task {task} at {self.addresses[task]}'
      if not view.is_fresh(now):
        told.append(f'{where} ({view.problem or "it fell silent"})')
      elif view.state is Activity.RUNNING:
        told.append(f'{where} (it runs in a group without this task)')
      elif view.state is not Activity.FORMING:
        told.append(f'{where} (it is there, but has not called form)')
    return ', '.join([*told, by_another] if by_another else told)

  def timeout_error(self, now: float, seconds: float) -> errors.Error:
    """Returns the error for a group that has not formed within `seconds`."""
    error = errors.RendezvousError
    views = self.views.values()
    if any(v.refused for v in views) and not any(
      v.is_fresh(now) for v in views
    ):
      error = errors.AuthenticationError
    why = ''.join(
      f'Task {caller} at {self.addresses[caller]} cannot connect to task '
      f'{cut.task} at {self.addresses.get(cut.task)} ({cut.why}). '
      for caller, cut in self._all_cuts()
    )
    if self._needs_majority and self._seated:
      why += (
        'It goes on with a majority of its last group '
        f'(tasks {sorted(self._seated)}), or if all others have surely died, so '
        'that two halves of a network that is cut never both go on. '
      )
    elif self._least > 1:
      why += (
        'It was started again and has nothing to go on from, so that it does '
        'not begin alone; the job may have ended. '
      )
    return error(
      f'Task {self.task} at {self.addresses[self.task]} found no group '
      f'within {seconds:g} s. Missing: {self.missing(now) or "nobody now"}. '
      f'{why}Fix: start those workers, look at their logs and addresses, or raise '
      'rendezvous_timeout_seconds.'
    )
