"""Who of those that are there forms a group, and who cannot connect to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
  """Returns the tasks that can all connect to each other, as far as is known.

  Of a pair in `cuts`, the task with more such pairs goes, else the higher one. The
  leader stays.
  """
  left = list(there)
  while pairs := [p for p in cuts if p[0] in left and p[1] in left]:
    ends = [task for pair in pairs for task in pair if task != leader]
    left.remove(max(ends, key=lambda task: (ends.count(task), task)))
  return left
