"""What a supervisor knows of tasks on other hosts, by their launchers.

Example:

  >>> from tf_strategies.launch import others
  >>> alone = others.Others()
  >>> alone.is_alone, list(alone.heard()), alone.where('worker 0')
  (True, [], '')
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_strategies.cluster import exit_codes
from tf_strategies.launch import output

# The status of a launcher that is gone.
LOST = exit_codes.RESTARTABLE_EXIT_CODE


class Others:
  """The launchers of a job's other hosts; here of none that would say anything.

  Args:
    node: this host's number.
    hosts: the address of each host.

  Attributes:
    node: see above.
    hosts: see above.
    is_alone: whether no other launcher is left that says something.
    places: the number of each task's host, by the task's name.
  """

  is_alone = True

  def __init__(self, node: int = 0, hosts: Sequence[str] = ()):
    self.node = node
    self.hosts = hosts
    self.places: Mapping[str, int] = {}

  def tell(
    self,
    task: str,
    status: int | None,
    losses: int,
    failed: bool,
    kind: str,
  ) -> None:
    """Tells the others how a task of this host is, if that is new."""

  def heard(self) -> Iterator[Mapping[str, Any]]:
    """Yields how tasks of other hosts are, and which launchers are lost."""
    yield from ()

  def close(self) -> None:
    """Ends the connections when all is sent."""

  def where(self, task: str) -> str:
    """Where a task of another host is, in words; empty for one of this host."""
    kind, _, number = task.partition(' ')
    if kind == 'node':
      return f' ({self.hosts[int(number)]})'
    place = self.places.get(task, self.node)
    return (
      '' if place == self.node else f' on node {place} ({self.hosts[place]})'
    )

  def ending(self, task: str, status: int) -> str:
    """How a task ended, in words."""
    if task.startswith('node ') and status == LOST:
      return 'its launcher is gone, or the network to it is cut'
    return output.ending(status)


def message(
  task: str,
  status: int | None,
  losses: int = 0,
  failed: bool = False,
  kind: str = '',
) -> dict[str, Any]:
  """Returns a message of a launcher about a task, or about the launcher `node N`.

  With `failed` all other tasks are to end. `kind` is of the launcher's note.
  """
  return {
    'task': task,
    'status': status,
    'losses': losses,
    'failed': failed,
    'kind': kind,
  }
