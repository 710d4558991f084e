"""Who of those that are there forms a group: decisions without any state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def has_quorum(
  present: Sequence[int],
  there: Sequence[int],
  gone: Sequence[int],
  last: Iterable[int],
  tasks: Iterable[int],
) -> bool:
  """Whether those that are there can go on, and no others can at the same time.

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
