"""Decides which present tasks form a group, given the pairs that cannot connect."""

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
  """Returns whether the present tasks may go on, while no other tasks can.

  They may if they are a majority of the last group, or half of it with its lowest
  task, or all members that have not surely died. Silence does not prove death: a cut
  network is silent too. A host that refuses connections at the address proves it.

  Args:
    present: present members of the last group.
    there: all present tasks.
    gone: tasks whose hosts refuse connections at their addresses.
    last: tasks of the last group.
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
