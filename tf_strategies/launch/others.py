"""What a supervisor knows of tasks on other hosts, by their launchers.

Example:

  >>> from tf_strategies.launch import others
  >>> alone = others.Others()
  >>> alone.links, list(alone.heard()), alone.where('worker 0')
  ([], [], '')
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_strategies.cluster import exit_codes
from tf_strategies.launch import output

# As that of a launcher that is gone.
_LOST = exit_codes.RESTARTABLE_EXIT_CODE


class Others:
  """The launchers of a job's other hosts; of none by default.

  Args:
    node: this host's number.
    links: `nodes.Link`s to the others, of the first host; to the first, of the others.
    hosts: the address of each host.
    places: the number of each task's host, by the task's name.

  Attributes:
    node: see above.
    links: those that are not lost.
  """

  def __init__(
    self,
    node: int = 0,
    links: Sequence[Any] = (),
    hosts: Sequence[str] = (),
    places: Mapping[str, int] | None = None,
  ):
    self.node = node
    self.links = list(links)
    self._hosts = hosts
    self._places = dict(places or {})
    self._told: dict[str, Mapping[str, Any]] = {}

  def tell(
    self,
    task: str,
    status: int | None,
    losses: int,
    failed: bool,
    kind: str,
  ) -> None:
    """Tells the others how a task of this host is, if that is new."""
    message = _message(task, status, losses, failed, kind)
    if self._told.get(task) != message:
      self._told[task] = message
      self._send(message)

  def heard(self) -> Iterator[Mapping[str, Any]]:
    """Yields how tasks of other hosts are, and which launchers are lost."""
    for link in tuple(self.links):
      messages = link.read()
      if link.is_lost:
        self.links.remove(link)
        link.close()
        messages.append(_message(f'node {link.node}', _LOST))
      for message in messages:
        self._send(message, link)  # The first host passes on what it hears.
        yield message

  def where(self, task: str) -> str:
    """Where a task of another host is, in words; empty for one of this host."""
    kind, _, number = task.partition(' ')
    if kind == 'node':
      return f' ({self._hosts[int(number)]})'
    place = self._places.get(task, self.node)
    return (
      '' if place == self.node else f' on node {place} ({self._hosts[place]})'
    )

  def ending(self, task: str, status: int) -> str:
    """How a task ended, in words."""
    if task.startswith('node ') and status == _LOST:
      return 'its launcher is gone, or the network to it is cut'
    return output.ending(status)

  def close(self) -> None:
    """Ends the connections when all is sent."""
    for link in self.links:
      link.close()
    self.links.clear()

  def _send(self, message, source=None) -> None:
    for link in self.links:
      if link is not source:
        link.send(message)


def _message(task, status, losses=0, failed=False, kind=''):
  """Returns a message of a launcher about a task, or about the launcher `node N`.

  With `failed` all other tasks are to end.
  """
  return {
    'task': task,
    'status': status,
    'losses': losses,
    'failed': failed,
    'kind': kind,
  }
