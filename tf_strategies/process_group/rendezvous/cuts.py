"""Pairs of tasks that could not connect to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_strategies.process_group.rendezvous import quorum

# Two workers that could not connect are not proposed together for this long.
CUT_SECONDS = 30.0
# Unless there is no group without both: then they try again after this.
RETRY_SECONDS = 5.0


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
    """Those of the tasks that can all connect to each other, in order."""
    cuts = list(self._among(lives, now, seconds))
    return quorum.leave_out(sorted(lives), cuts, leader)

  def untold(
    self, task: int, lives: Mapping[int, str], now: float
  ) -> dict[str, Any] | None:
    """One of the tasks to which `task` could not connect, and when; told once."""
    for pair, (why, at) in self._among(lives, now, CUT_SECONDS).items():
      if pair[0] == task:
        del self._cuts[pair]  # The leader knows it from now on.
        return {'task': pair[1], 'why': why, 'age': int(now - at)}
    return None
