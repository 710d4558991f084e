"""Launchers of several hosts: they meet at one address, and stay in touch.

The first host's launcher listens at the rendezvous. The others tell it where their
tasks will be, and get the whole job back. From then on each launcher tells the others
what happens on its host, and the first one passes that on. Launchers know each other
by the job's secret, as tasks do.

The connections are those of process groups, in the thread of their server. The
launchers form no group: a group needs the address of each process before it forms,
and ends as a whole when one of them is lost.
"""

import asyncio
import collections
import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from tf_strategies import errors, option_checks, process_group, version
from tf_strategies.cluster import checks
from tf_strategies.launch import tasks
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol, server

_POLL_SECONDS = 0.05
_SECONDS_BEFORE_TELLING = 3.0
_LAST_SECONDS = 1.0
# TCP's own probes: a host that is off the network is lost after 20 seconds.
_PROBE_AFTER_SECONDS, _PROBES = 5, 3
_PROBING = {
  'TCP_KEEPIDLE': _PROBE_AFTER_SECONDS,
  'TCP_KEEPINTVL': _PROBE_AFTER_SECONDS,
  'TCP_KEEPCNT': _PROBES,
  'TCP_USER_TIMEOUT': 1000 * _PROBE_AFTER_SECONDS * (_PROBES + 1),
}
_SAME_LINE = (
  'Fix: start the same line on all hosts, each with its own --node_rank and the same '
  'secret'
)
_Kind = protocol.Kind


class Launchers(contextlib.AbstractContextManager):
  """The launchers of a job's hosts; a context. Waits until all have met.

  Args:
    place: the place of this host.
    counts: the number of its tasks by type.
    ports: the ports for them.
    say: a function that prints a line while this launcher waits.

  Attributes:
    rank: the number of this host.
    secret: the secret of the job, which the environment has.
    hosts: all hosts in their order.
    events: what has happened on other hosts since the beginning of the job, as host,
      name of the event and values. The last event of a host is 'lost'.

  Raises:
    UnsupportedOptionError: the environment has no secret, or a wrong one.
    RendezvousError: hosts are missing at the deadline: names them; or this host
      cannot listen at the rendezvous, or was refused there.
    AuthenticationError: the first host has another secret.
  """

  def __init__(
    self,
    place: tasks.Place,
    counts: Mapping[str, int],
    ports: Sequence[int],
    say: Callable[[str], None],
  ):
    options = process_group.GroupOptions.from_env()
    option_checks.check(
      options.secret,
      f'--nnodes={place.nnodes} without a secret',
      'one secret on all hosts',
      'set TFS_SECRET (or TFS_SECRET_FILE) on all hosts to what `python -c '
      '"import secrets; print(secrets.token_hex(32))"` prints once',
    )
    self.rank = place.node_rank
    self.secret = options.secret.decode('utf-8')
    self.hosts: list[tasks.HostTasks] = []
    self.events: collections.deque[list] = collections.deque()
    self._place = place
    self._say = say
    self._options = options
    host, _ = checks.split_address(place.rendezvous, 'rendezvous')
    self._mine = tasks.HostTasks(host, dict(counts), list(ports))
    self._ends_at = time.monotonic() + place.rendezvous_timeout
    self._tell_at = time.monotonic() + _SECONDS_BEFORE_TELLING
    # The first host is connected to all others, and the others to the first.
    self._connections: dict[int, connection_lib.Connection] = {}
    # The hosts that the first one knows. Its own comes first: another host may call
    # as soon as the server runs.
    self._parts = {0: self._mine}
    self._refusal = ''
    # The others listen too, but nobody knows where: it is their thread.
    address = (
      place.rendezvous if place.node_rank == 0 else f'{tasks.LOOPBACK}:0'
    )
    handlers = {_Kind.NODE: self._serve}
    self._server = server.Server(
      address, place.node_rank, options, handlers, None, place.nnodes
    )
    try:
      if place.node_rank == 0:
        self._lead()
      else:
        self._join()
    except BaseException:
      self.__exit__()
      raise

  def tell(self, *event) -> None:
    """Tells the others what happens here: the name of the event, and its values."""
    self._send_soon(_Kind.EVENT, [self.rank, *event])

  def __exit__(self, *_):
    """Ends the connections after the last messages, at most a second later."""
    self._server.call(self._end())
    self._server.close()

  def _lead(self) -> None:
    try:
      while not self.hosts:
        missing = sorted({*range(self._place.nnodes)} - {*self._parts})
        self._wait(f'node {", ".join(map(str, missing))}')
    except errors.RendezvousError as e:
      self._send_soon(_Kind.REJECT, str(e))
      raise

  def _send_soon(self, kind, message) -> None:
    self._server.loop.call_soon_threadsafe(self._send, kind, message)

  async def _serve(self, connection, client, message) -> None:
    """Takes up another launcher, on the first host."""
    its_version, its_count, part = message
    objection = self._objection(client, its_version, its_count)
    if objection:
      self._refusal = f' One was refused: {objection}.'
      connection.send(_Kind.REJECT, objection)
      connection.close()
      return
    # Another version may have other fields.
    self._parts[client] = tasks.HostTasks(*part)
    self._connections[client] = connection
    if len(self._parts) == self._place.nnodes:
      self.hosts = [node for _, node in sorted(self._parts.items())]
      self._send(_Kind.JOB, self.hosts)
    await self._follow(client, connection)

  def _objection(self, client: int, its_version: str, its_count: int) -> str:
    """Returns why a launcher cannot take part; empty if it can."""
    count = self._place.nnodes
    who = f'node {client}'
    if its_count != count:
      return f'{who} has --nnodes={its_count}, node 0 has --nnodes={count}'
    if its_version != version.__version__:
      return (
        f'{who} runs tf_strategies {its_version}, node 0 runs '
        f'{version.__version__}'
      )
    if self.hosts:
      return 'the job has begun'
    if client in self._parts or client >= count:
      return f'another launcher has --node_rank={client}'
    return ''

  def _join(self) -> None:
    place = self._place
    while not (self._connections or self._refusal):
      try:
        self._server.call(self._dial())
      except (OSError, protocol.ProtocolError) as e:
        why = getattr(e, 'strerror', None) or e or 'no answer'
        self._wait(f'node 0 ({why})')
    # The first host ends the wait, and says why.
    while not self.hosts:
      if self._refusal or not self._connections:
        why = self._refusal or 'it has ended, see what its launcher says'
        raise errors.RendezvousError(
          f'Node 0 at {place.rendezvous} refused node {place.node_rank}: {why}. '
          f'{_SAME_LINE}.'
        )
      self._wait('the others', grace=connection_lib.HANDSHAKE_SECONDS)

  async def _dial(self) -> None:
    place = self._place
    connection = await connection_lib.dial(
      place.rendezvous, place.node_rank, 0, self._options
    )
    node = self._mine._replace(host=connection.sock.getsockname()[0])
    connection.send(_Kind.NODE, [version.__version__, place.nnodes, node])
    self._connections[0] = connection
    self._server.spawn(self._follow(0, connection))

  def _wait(self, whom: str, grace: float = 0.0) -> None:
    """Waits a moment; raises after the deadline, and tells of it now and then."""
    place, now = self._place, time.monotonic()
    if now > self._ends_at + grace:
      raise errors.RendezvousError(
        f'Node {place.node_rank} waited {place.rendezvous_timeout:g} s at {place.rendezvous} for '
        f'{whom} (--nnodes={place.nnodes}).{self._refusal} {_SAME_LINE}, or raise '
        '--rendezvous_timeout.'
      )
    if now > self._tell_at:
      self._tell_at = now + 10 * _SECONDS_BEFORE_TELLING
      self._say(
        f'Node {place.node_rank} waits at {place.rendezvous} for {whom}.'
      )
    time.sleep(_POLL_SECONDS)

  # From here on everything runs in the server's loop.

  async def _follow(self, rank: int, connection) -> None:
    """Takes what another launcher says, until it is gone."""
    _probe(connection.sock)
    try:
      while True:
        kind, said = await connection.expect(
          _Kind.JOB, _Kind.REJECT, _Kind.EVENT
        )
        if kind is _Kind.JOB:
          self.hosts = [tasks.HostTasks(*part) for part in said]
        elif kind is _Kind.REJECT:
          self._refusal = said
        else:
          self._take(said, connection)
    except (OSError, protocol.ProtocolError):
      connection.close()
      self._connections.pop(rank)
      self._parts.pop(rank, None)
      if not self.hosts:
        return  # Its launcher may be started again.
      # Without the first host nothing is heard of the others.
      everyone = range(self._place.nnodes)
      for node in [rank] if rank else {*everyone} - {self.rank}:
        self._take([node, 'lost'])

  def _take(self, event, source=None) -> None:
    self.events.append(event)
    # The first host passes events on.
    self._send(_Kind.EVENT, event, source)

  def _send(self, kind, message, source=None) -> None:
    for connection in self._connections.values():
      if connection is not source:
        connection.send(kind, message)

  async def _end(self) -> None:
    for connection in self._connections.values():
      with contextlib.suppress(OSError):
        connection.sock.shutdown(socket.SHUT_WR)
    # A socket that closes with unread input drops its unsent output.
    ends_at = self._server.now() + _LAST_SECONDS
    while self._connections and self._server.now() < ends_at:
      await asyncio.sleep(_POLL_SECONDS)


def _probe(sock) -> None:
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in _PROBING.items():
    # Not every system has all of them.
    with contextlib.suppress(OSError, AttributeError):
      sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
