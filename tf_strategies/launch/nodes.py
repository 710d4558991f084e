"""Launchers of several hosts: they meet at one address, and stay in touch.

The first host's launcher listens at the rendezvous; the others tell it where their
tasks will be, and get the whole job back. The connections then carry how tasks end:
a star around the first launcher, which passes on what it hears. Launchers know each
other by the job's secret, as its tasks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_strategies import errors, option_checks, process_group, version
from tf_strategies.cluster import checks
from tf_strategies.launch import output, tasks
from tf_strategies.process_group.network import (
  authentication,
  protocol,
  sockets,
)
from tf_strategies.process_group.network import connection as connection_lib

_POLL_SECONDS = 0.2
# What a wait may take before somebody is told of it, and between two such lines.
_SECONDS_BEFORE_TELLING = 3.0
_LAST_SECONDS = 1.0
_READ_BYTES = 1 << 16
# TCP's own probes: a host that is off the network is lost after 20 seconds.
_PROBE_AFTER_SECONDS, _PROBES = 5, 3
_Kind = protocol.Kind


@dataclasses.dataclass(frozen=True)
class Place:
  """Which host of a job this is, and where its launchers meet: as the flags say.

  Raises:
    UnsupportedOptionError: a value out of range.
    ClusterConfigError: the rendezvous is no address.

  Example:

    >>> Place(2, 1, 'host0:29400').rank
    1
  """

  count: int
  rank: int
  rendezvous: str
  timeout: float = 300.0
  address: str | None = None

  def __post_init__(self):
    option_checks.check_int('--nnodes', self.count, 1)
    fix = 'count hosts from 0'
    option_checks.check_int(
      '--node_rank', self.rank, 0, self.count - 1, fix=fix
    )
    option_checks.check_seconds('--rendezvous_timeout', self.timeout)
    with checks.reading('--rendezvous'):
      checks.split_address(self.rendezvous, 'its value')


def options_of(place: Place) -> process_group.GroupOptions:
  """How launchers know each other: by the secret of the environment.

  Raises:
    UnsupportedOptionError: there is none, or a wrong one.
  """
  options = process_group.GroupOptions.from_env()
  option_checks.check(
    options.secret,
    f'--nnodes={place.count} without a secret',
    'the same one on all hosts',
    'set TFS_SECRET (or TFS_SECRET_FILE) on all hosts to what `python -c "import '
    'secrets; print(secrets.token_hex(32))"` prints once',
  )
  return options


def meet(
  place: Place, counts: Mapping[str, int], ports: Sequence[int], say: Callable
) -> tuple[list[tasks.Node], list[Link]]:
  """Waits until the launchers of all hosts have met.

  Args:
    place: of this host.
    counts: of its tasks by type.
    ports: for them.
    say: is told of a wait, in a line.

  Returns:
    All hosts in their order; and this one's links: the first host has one to each
    other, which have one to it.

  Raises:
    RendezvousError: hosts are missing at the deadline: names them; or this host
      cannot listen at the rendezvous, or was refused there.
    AuthenticationError: the first host has another secret.
  """
  meeting = _Meeting(place, counts, ports, say)
  return asyncio.run(meeting.lead() if place.rank == 0 else meeting.join())


class _Meeting:
  """One launcher's part of the rendezvous."""

  def __init__(self, place, counts, ports, say):
    self._place = place
    self._say = say
    self._credentials = options_of(place).credentials()
    host, self._port = checks.split_address(place.rendezvous, 'rendezvous')
    self._mine = {
      'version': version.__version__,
      'host': place.address or host,
      'counts': dict(counts),
      'ports': list(ports),
    }
    self._ends_at = time.monotonic() + place.timeout
    self._tell_at = time.monotonic() + _SECONDS_BEFORE_TELLING
    # Of the first host: what the others said, and who was refused, and why.
    self._parts: dict[int, Any] = {}
    self._connections: dict[int, connection_lib.Connection] = {}
    self._refused = ''

  async def lead(self):
    """The first host's part."""
    self._parts[0] = self._mine
    place, loop = self._place, asyncio.get_running_loop()
    try:
      listener = sockets.listen(*checks.split_address(place.rendezvous, 'it'))
    except OSError as e:
      raise errors.RendezvousError(
        f'Node 0 cannot listen at --rendezvous={place.rendezvous}: '
        f'{e.strerror or e}. Give an address of this host and a port that is free.'
      ) from e
    serving: set[asyncio.Task] = set()

    async def accept():
      while True:
        sock = await sockets.accept(listener)
        serving.add(loop.create_task(self._serve(sock)))

    serving.add(loop.create_task(accept()))
    try:
      while missing := sorted(set(range(place.count)) - set(self._parts)):
        self._wait(f'node {", ".join(map(str, missing))}')
        await asyncio.sleep(_POLL_SECONDS / 4)
    except errors.RendezvousError as e:
      for connection in self._connections.values():
        connection.send(_Kind.REJECT, str(e))
      raise
    finally:
      for task in serving:
        task.cancel()
      await asyncio.gather(*serving, return_exceptions=True)
      listener.close()
    parts = [self._parts[rank] for rank in range(place.count)]
    for connection in self._connections.values():
      connection.send(_Kind.JOB, parts)
    return _nodes(parts), [
      Link(rank, self._parts[rank]['host'], await _taken(connection))
      for rank, connection in sorted(self._connections.items())
    ]

  async def _serve(self, sock) -> None:
    """Takes up one of the others, and notices if it leaves."""
    connection = connection_lib.Connection(sock)
    rank = None
    try:
      request, part = await connection_lib.within(
        authentication.HANDSHAKE_SECONDS, self._hear(connection)
      )
      if objection := self._objection(request, part):
        connection.send(_Kind.REJECT, objection)
        await asyncio.sleep(_POLL_SECONDS)  # It has time to read.
        raise protocol.ProtocolError(objection)
      rank = request.client
      self._parts[rank], self._connections[rank] = part, connection
      await connection.receive()  # Nothing comes before all are there.
      raise protocol.ProtocolError(f'node {rank} spoke too early')
    except asyncio.CancelledError:
      if rank is None:
        connection.close()
      raise
    except (OSError, protocol.ProtocolError, errors.AuthenticationError) as e:
      if rank is None:
        self._refused = (
          f' One that came was refused, or left ({e or "no proof in time"}): is its '
          'secret the same?'
        )
      else:
        del self._parts[rank], self._connections[rank]
      connection.close()

  async def _hear(self, connection):
    request = await connection_lib.accept(connection, 0, self._credentials)
    _, part = await connection.expect(_Kind.NODE)
    return request, part

  def _objection(self, request, part) -> str:
    """Why a launcher cannot take part; empty if it can."""
    count = self._place.count
    who = f'node {request.client}'
    if request.world != count:
      return f'{who} has --nnodes={request.world}, node 0 has --nnodes={count}'
    if part['version'] != version.__version__:
      return (
        f'{who} runs tf_strategies {part["version"]}, node 0 runs '
        f'{version.__version__}'
      )
    if request.client in self._parts or request.client >= count:
      return f'another launcher has --node_rank={request.client}'
    if set(part['counts']) != set(self._mine['counts']):
      return f'{who} has tasks of types {sorted(part["counts"])}'
    return ''

  async def join(self):
    """The part of the other hosts."""
    place = self._place
    connection = await self._dial()
    sock = connection.detach()
    if place.address is None:
      self._mine['host'] = sock.getsockname()[0]
    connection.send(_Kind.NODE, self._mine)
    # The first host ends the wait, and says why.
    heard = asyncio.ensure_future(connection.expect(_Kind.JOB, _Kind.REJECT))
    try:
      while not heard.done():
        self._wait('the others', grace=authentication.HANDSHAKE_SECONDS)
        await asyncio.wait([heard], timeout=_POLL_SECONDS)
      kind, message = heard.result()
    except (OSError, protocol.ProtocolError) as e:
      raise errors.RendezvousError(
        f'Node 0 at {place.rendezvous} left before all were there ({e}). See what '
        'its launcher says.'
      ) from e
    finally:
      heard.cancel()
    if kind == _Kind.REJECT:
      connection.close()
      raise errors.RendezvousError(
        f'Node 0 at {place.rendezvous} refused node {place.rank}: {message}. Start '
        'the same line on all hosts, each with its own --node_rank.'
      )
    host = _nodes(message)[0].host
    return _nodes(message), [Link(0, host, await _taken(connection))]

  async def _dial(self) -> connection_lib.Connection:
    place = self._place
    request = authentication.Request(
      authentication.Purpose.CONTROL, place.rank, 0, place.count
    )
    while True:
      try:
        return await connection_lib.dial(
          place.rendezvous, request, self._credentials
        )
      except (OSError, protocol.ProtocolError) as e:
        why = getattr(e, 'strerror', None) or e or 'no answer'
        self._wait(f'node 0 ({why})')
        await asyncio.sleep(_POLL_SECONDS)

  def _wait(self, whom: str, grace: float = 0.0) -> None:
    """Raises if the deadline has passed; tells of the wait now and then."""
    place, now = self._place, time.monotonic()
    if not output.is_read(1):
      # The ssh that started this launcher has ended, and nobody else can end it.
      raise errors.RendezvousError(
        f'Node {place.rank} waited at {place.rendezvous} for {whom}, and nobody '
        'reads its output any more.'
      )
    if now > self._ends_at + grace:
      raise errors.RendezvousError(
        f'Node {place.rank} waited {place.timeout:g} s at {place.rendezvous} for '
        f'{whom} (--nnodes={place.count}).{self._refused} Start the same line on '
        'all hosts, each with its own --node_rank, or raise --rendezvous_timeout.'
      )
    if now > self._tell_at:
      self._tell_at = now + 10 * _SECONDS_BEFORE_TELLING
      self._say(
        f'Node {place.rank} waits at {place.rendezvous} for {whom}.'
        f'{self._refused}'
      )


def _nodes(parts) -> list[tasks.Node]:
  return [tasks.Node(p['host'], p['counts'], p['ports']) for p in parts]


async def _taken(connection) -> Any:
  """The socket of a connection whose bytes are on their way."""
  while connection.pending:
    await asyncio.sleep(0)
  return connection.detach()


class Link:
  """Messages to and from another launcher; nothing here blocks.

  Attributes:
    node: the other's rank.
    host: its address.
    is_lost: whether the connection has ended.
    pending: whether something waits to be sent.
  """

  def __init__(self, node: int, host: str, sock: Any):
    self.node = node
    self.host = host
    self.is_lost = False
    self._sock = sock
    self._heard = bytearray()
    self._unsent = bytearray()
    for level, name, value in (
      (socket.SOL_SOCKET, 'SO_KEEPALIVE', 1),
      (socket.IPPROTO_TCP, 'TCP_KEEPIDLE', _PROBE_AFTER_SECONDS),
      (socket.IPPROTO_TCP, 'TCP_KEEPINTVL', _PROBE_AFTER_SECONDS),
      (socket.IPPROTO_TCP, 'TCP_KEEPCNT', _PROBES),
      (
        socket.IPPROTO_TCP,
        'TCP_USER_TIMEOUT',
        1000 * _PROBE_AFTER_SECONDS * (_PROBES + 1),
      ),
    ):
      # Not every system has all of them.
      with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(level, getattr(socket, name), value)

  def fileno(self) -> int:
    """Of the socket."""
    return self._sock.fileno()

  @property
  def pending(self) -> bool:
    """See class."""
    return bool(self._unsent) and not self.is_lost

  def send(self, message: Mapping[str, Any]) -> None:
    """Sends how a task is; what does not fit is sent by `flush`."""
    payload = json.dumps(message).encode('utf-8')
    self._unsent += protocol.Frame(_Kind.TASK, payload=payload).pack()
    self.flush()

  def flush(self) -> None:
    """Sends as much as cannot block."""
    try:
      while self.pending:
        del self._unsent[: self._sock.send(self._unsent)]
    except (BlockingIOError, InterruptedError):
      return
    except OSError:
      self.is_lost = True

  def read(self) -> list[Mapping[str, Any]]:
    """What has been heard since the last call."""
    block = bytearray(_READ_BYTES)
    try:
      while count := self._sock.recv_into(memoryview(block)):
        self._heard += block[:count]
      self.is_lost = True
    except (BlockingIOError, InterruptedError):
      pass
    except OSError:
      self.is_lost = True
    try:
      return list(self._messages())
    except protocol.ProtocolError:
      self.is_lost = True
      return []

  def _messages(self):
    size = protocol.FRAME_HEADER_BYTES
    while len(self._heard) >= size:
      kind, _, tag, payload = protocol.frame_lengths(bytes(self._heard[:size]))
      end = size + tag + payload
      if len(self._heard) < end:
        return
      data = bytes(self._heard[size + tag : end])
      del self._heard[:end]
      if kind != _Kind.TASK:
        raise protocol.ProtocolError(f'a launcher sent {kind.name}')
      yield connection_lib.decode(protocol.Frame(kind, payload=data))

  def close(self) -> None:
    """Ends the connection when the other has what was sent, or a second later."""
    with contextlib.suppress(OSError):
      self._sock.shutdown(socket.SHUT_WR)
    ends_at = time.monotonic() + _LAST_SECONDS
    # What was not read when it closes would take along what was sent.
    while not self.is_lost and time.monotonic() < ends_at:
      self.read()
      time.sleep(_LAST_SECONDS / 100)
    self._sock.close()
