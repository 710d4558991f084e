"""Who of those that are there forms a group, and who cannot connect to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Two workers that could not connect are not proposed together for this long.
CUT_SECONDS = 30.0
# Unless there is no group without both: then they try again after this.
RETRY_SECONDS = 5.0


def has_quorum(
  present: Sequence[int],
  there: Sequence[int],
  gone: Sequence[int],
  last: Iterable[int],
  tasks: Iterable[int],
) -> bool:
  """Returns whether those that are there can go on, and no others can at the same time.

  They are a majority of the last group; half of it with its lowest task; or all of
  whom it is not certain that they have died. What a cut looks like, silence, is no
  evidence of death; a host that refuses connections at an address is.

  Args:
    present: the members of the last group that are there.
    there: all tasks that are.
    gone: tasks at whose addresses nobody listens.
    last: the tasks of the last group.
    tasks: all tasks of the cluster.
  """
  if {*there, *gone}.issuperset(tasks):
    return True
  last = list(last)
  if 2 * len(present) == len(last):
    return min(last) in present
  return 2 * len(present) > len(last)


def leave_out(
  there: Sequence[int], cuts: Sequence[tuple[int, int]], leader: int
) -> list[int]:
  """The tasks of which all can connect to each other, as far as is known.

  Of a pair that cannot, the one with more such pairs goes, else the higher one;
  the leader stays.
  """
  left = list(there)
  while pairs := [p for p in cuts if p[0] in left and p[1] in left]:
    ends = [task for pair in pairs for task in pair if task != leader]
    left.remove(max(ends, key=lambda task: (ends.count(task), task)))
  return left


class Cuts:
  """What one task knows of such pairs, and for how long that counts.

  A pair is of two processes: `lives` are the incarnations of tasks. One that was
  started again may be reached.
  """

  def __init__(self):
    self._cuts: dict[tuple[int, int], tuple[str, float, list[str]]] = {}

  def add(
    self,
    caller: int,
    called: int,
    why: str,
    at: float,
    lives: Mapping[int, str],
  ) -> None:
    """The caller could not connect to the called at a time."""
    pair = caller, called
    if all(task in lives for task in pair):
      self._cuts[pair] = why, at, [lives[task] for task in pair]

  def reasons(self) -> list[tuple[tuple[int, int], str]]:
    """All pairs, and why, also of those that count no more."""
    return [(pair, why) for pair, (why, *_) in list(self._cuts.items())]

  def _among(self, lives: Mapping[int, str], now: float, seconds: float):
    return {
      pair: (why, at)
      # A copy: threads of users ask too.
      for pair, (why, at, were) in list(self._cuts.items())
      if now - at < seconds and were == [lives.get(task) for task in pair]
    }

  def leave_out(
    self,
    lives: Mapping[int, str],
    leader: int,
    now: float,
    seconds: float = CUT_SECONDS,
  ) -> list[int]:
    """Returns the tasks that can all connect to each other, in order."""
    cuts = list(self._among(lives, now, seconds))
    return leave_out(sorted(lives), cuts, leader)

  def untold(
    self, task: int, lives: Mapping[int, str], now: float
  ) -> dict[str, Any] | None:
    """One of the tasks to which `task` could not connect, and when; told once."""
    for pair, (why, at) in self._among(lives, now, CUT_SECONDS).items():
      if pair[0] == task:
        del self._cuts[pair]  # The leader knows it from now on.
        return {'task': pair[1], 'why': why, 'age': int(now - at)}
    return None
