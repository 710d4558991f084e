"""Finds the rank at fault: missing heartbeats, mismatches and timeouts.

It has no sockets or clocks: times and the descriptions of ranks are arguments.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tf_strategies.cluster import workers as workers_lib
from tf_strategies.process_group import state as state_lib

# Number of ranks that a message spells out.
_NAMED = 4


class HeartbeatMonitor:
  """Notices ranks that are silent for longer than `timeout_seconds`.

  Attributes:
    interval_seconds: how often to send heartbeats and to call `overdue`.
  """

  def __init__(self, ranks: Iterable[int], timeout_seconds: float, now: float):
    self.interval_seconds = min(1.0, timeout_seconds / 8)
    self._heard = dict.fromkeys(ranks, now)
    self._timeout = timeout_seconds
    self._checked = now
    # How long this process stood still the last time, and when it went on.
    self._pause, self._resumed = 0.0, now

  def heard(self, rank: int, now: float) -> None:
    """Notes that a rank sent something."""
    # The rank that fell silent first comes first.
    self._heard.pop(rank, None)
    self._heard[rank] = now

  def overdue(self, now: float) -> dict[int, float]:
    """Returns the lost ranks, and the seconds for which each has been silent.

    The rank that fell silent first comes first.
    """
    self.own_pause(now)
    if now - self._checked > self._timeout / 2 + self.interval_seconds:
      # This process was stopped for a while: what the others sent may still lie
      # in the buffers, so all of them get another chance.
      self._heard = dict.fromkeys(self._heard, now)
    self._checked = now
    return {
      rank: now - heard
      for rank, heard in self._heard.items()
      if now - heard > self._timeout
    }

  def own_pause(self, now: float) -> float:
    """Returns how long this process itself stood still, if others just lost it.

    The time is in seconds, and 0 if the process did not stand still.
    """
    if now - self._checked > self._timeout:
      self._pause, self._resumed = now - self._checked, now
    return self._pause if now - self._resumed < self._timeout else 0.0


def diagnose(
  members: Sequence[state_lib.Member],
  suspicion: Mapping[str, Any],
  said: Mapping[int, Mapping[str, Any]],
) -> state_lib.FailureReport:
  """Returns why a collective failed, from the suspicion of a rank.

  See `ControlPlane.suspect`. `said` holds the `GroupState.describe()` of each rank that answered.
  """
  explain = _mismatch if suspicion['seconds'] is None else _timeout
  error, message, ranks = explain(members, suspicion, said)
  member = members[ranks[0]]
  return state_lib.FailureReport(
    error,
    message,
    member.rank,
    member.address,
    suspicion['name'] or None,
    suspicion['sequence'],
    ranks,
  )


def stall(
  members: Sequence[state_lib.Member],
  before: Mapping[int, Mapping[str, Any]],
  said: Mapping[int, Mapping[str, Any]],
) -> state_lib.FailureReport | None:
  """Returns why ranks wait for each other for ever; None if they may go on.

  They do if no rank has moved since `before`, and the ranks are in different methods of
  a model: one evaluates, say, while the others train. They also do if one of them begins
  `fit`, which every rank has to begin.
  """
  ranks = range(len(members))
  if min(len(said), len(before)) < len(members):
    return None
  calls = [_begun(said[rank]) for rank in ranks]
  if len(set(calls)) == 1:
    return None
  if not all(calls) and not any(map(_begins_fit, map(said.get, ranks))):
    return None
  places = [_place(said[rank]) for rank in ranks]
  if None in places or places != [_place(before[rank]) for rank in ranks]:
    return None
  differing = tuple(rank for rank in ranks if calls[rank] != calls[0])
  shown = [0, *differing[:_NAMED]]
  told = ', '.join(
    f'rank {rank} in {calls[rank] or "no method"}' for rank in shown
  )
  member = members[differing[0]]
  return state_lib.FailureReport(
    'CollectiveMismatchError',
    f'The ranks wait for each other in different methods of a model: {told}. '
    'Fix: call the same methods on all workers, in the same order, outside of any '
    '`if` on the rank, and not in a callback of the chief alone. Do not repeat a '
    'call that failed on one worker alone.',
    member.rank,
    member.address,
    ranks=differing,
  )


def _begun(description) -> str:
  """Returns the method of a model that a rank is in, or begins."""
  if _begins_fit(description):
    return f'the {workers_lib.BEGIN_OF_FIT}'
  return description['call']


def _begins_fit(description) -> bool:
  """Returns whether a rank waits for the others to begin `fit`."""
  return workers_lib.BEGIN_OF_FIT in description['exchanges']


def _place(description) -> tuple | None:
  """Returns the method in which a rank waits; None if it does not wait."""
  if not description['busy'] and not description['exchanges']:
    return None
  return (
    description['call'],
    description['busy'],
    description['sequence'],
    sorted(description['exchanges']),
  )


def _mismatch(members, suspicion, said) -> tuple[str, str, Sequence[int]]:
  """Returns the type of the error, its message and the ranks that it is about."""
  sequence, reporter = suspicion['sequence'], suspicion['reporter']
  peer = next(iter(suspicion['ranks']), reporter)
  texts = {
    rank: description['recent'][str(sequence)]
    for rank, description in sorted(said.items())
    if str(sequence) in description['recent']
  }
  first = min(texts, default=reporter)
  differing = tuple(r for r, text in texts.items() if text != texts[first])
  if differing:
    shown = [first, *differing[:_NAMED]]
    told = '; '.join(
      f'{members[r]} does {texts[r]}{_in_call(said, r)}' for r in shown
    )
  else:
    # The peer is at a sequence number that it has forgotten, or died since.
    differing = (peer,)
    told = (
      f'{members[reporter]} does {suspicion["text"]}; '
      f'{members[peer]} does something else'
    )
  return (
    'CollectiveMismatchError',
    f'The ranks disagree on collective {sequence}: {told}. All ranks must '
    'call the same collectives in the same order, with the same names, dtypes '
    'and sizes.',
    differing,
  )


def _timeout(members, suspicion, said) -> tuple[str, str, Sequence[int]]:
  """Returns what `_mismatch` does, for ranks that have not arrived."""
  sequence, tag = suspicion['sequence'], suspicion['tag']
  what = f'{suspicion["text"]} (sequence {sequence})'
  there = {r for r, place in said.items() if place['sequence'] >= sequence}
  if tag:
    what = f'exchange {tag!r}'
    there = {r for r, place in said.items() if tag in place['exchanges']}
  late = [rank for rank in range(len(members)) if rank not in there]
  if late:
    why = '; '.join(_where(members, said, rank) for rank in late[:_NAMED])
  else:
    late = suspicion['ranks'] or [0]
    why = 'all ranks are there, but the bytes do not move: waiting for ' + (
      ', '.join(str(members[rank]) for rank in late[:_NAMED])
    )
  return (
    'CollectiveTimeoutError',
    f'{what} did not finish within {suspicion["seconds"]:g} s, though all workers are alive: {why}. Look '
    'at what that worker does, or raise collective_timeout_seconds.',
    late,
  )


def _where(members, said, rank: int) -> str:
  description = said.get(rank)
  if description is None:
    return f'{members[rank]} does not say where it is'
  last = description['sequence']
  text = description['recent'].get(str(last), 'nothing yet')
  verb = 'is still in' if description['busy'] else 'was last in'
  where = f'{text} (sequence {last}){_in_call(said, rank)}'
  return f'{members[rank]} has not arrived: it {verb} {where}'


def _in_call(said, rank: int) -> str:
  call = said[rank]['call']
  return f' in {call}' if call else ''
