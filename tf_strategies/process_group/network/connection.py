"""Authenticated connections with frames, inside an event loop."""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Coroutine, Iterable
from typing import Any

from tf_strategies import errors
from tf_strategies.cluster import checks
from tf_strategies.process_group.network import (
  authentication,
  names,
  protocol,
  sockets,
)


class Connection:
  """A non-blocking socket that carries frames.

  Reads exactly what a frame needs, so that the socket can change hands between
  two frames. One task at a time may receive. Sends never wait: what does not fit
  is sent later, and whoever receives notices that a connection is broken.

  Args:
    sock: connected and non-blocking; owned from here on.

  Attributes:
    sock: the socket, which may change hands between two frames.
    max_payload: the most bytes that a frame may announce.
  """

  def __init__(self, sock: socket.socket):
    self._loop = asyncio.get_running_loop()
    self.sock = sock
    self._unsent = bytearray()
    self._broken = False
    self.max_payload = protocol.MAX_PAYLOAD_BYTES
    with contextlib.suppress(OSError):
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  @property
  def pending(self) -> bool:
    """Returns whether something is still to be sent."""
    return bool(self._unsent)

  def write(self, data: bytes) -> None:
    """Sends bytes."""
    if self._broken:
      return
    idle = not self._unsent
    self._unsent += data
    if idle:
      self._flush()
      if self._unsent:
        self._loop.add_writer(self.sock, self._flush)

  def send(self, kind: protocol.Kind, message: Any = None) -> None:
    """Sends a frame that holds a JSON value."""
    self.write(protocol.pack(kind, message))

  async def read(self, size: int) -> bytes:
    """Receives exactly `size` bytes; ConnectionError if the peer closed before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
      count = await self._loop.sock_recv_into(self.sock, view)
      if not count:
        raise ConnectionResetError('the peer closed the connection')
      view = view[count:]
    return bytes(data)

  async def receive(self) -> tuple[protocol.Kind, Any]:
    """Receives a frame and returns its kind and its JSON value."""
    header = await self.read(protocol.HEADER_BYTES)
    kind, size = protocol.unpack_header(header, self.max_payload)
    return kind, protocol.unpack(kind, await self.read(size))

  async def expect(self, *kinds: protocol.Kind) -> tuple[protocol.Kind, Any]:
    """Receives as `receive`; raises ProtocolError for a frame of another kind."""
    kind, message = await self.receive()
    if kind not in kinds:
      raise protocol.ProtocolError(f'the peer sent {kind.name}')
    return kind, message

  def shut_down(self) -> None:
    """Ends both directions, which wakes the task that waits for them."""
    with contextlib.suppress(OSError):
      self.sock.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    """Closes the socket; only where no task waits for it."""
    self._give_up()
    self.shut_down()
    self.sock.close()

  def _flush(self) -> None:
    try:
      del self._unsent[: self.sock.send(self._unsent)]
    except BlockingIOError:
      return
    except OSError:
      self._give_up()
    if not self._unsent:
      self._loop.remove_writer(self.sock)

  def _give_up(self) -> None:
    self._broken = True
    if self._unsent:
      self._unsent.clear()
      if not self._loop.is_closed():
        self._loop.remove_writer(self.sock)


async def together(
  coroutines: Iterable[Coroutine], seconds: float | None = None
) -> list[Any]:
  """Awaits coroutines at once; the first error ends all of them.

  Raises:
    TimeoutError: they take longer than `seconds`.
  """
  tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
  try:
    if tasks:
      how = {'timeout': seconds, 'return_when': asyncio.FIRST_EXCEPTION}
      done, pending = await asyncio.wait(tasks, **how)
      for task in done:
        task.result()
      if pending:
        raise TimeoutError('it does not answer')
    return [task.result() for task in tasks]
  finally:
    # Either way their exceptions count as seen, also if this is cancelled.
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def within(seconds: float, coroutine: Coroutine) -> Any:
  """Awaits a coroutine; TimeoutError if it takes longer.

  Unlike `asyncio.wait_for` before Python 3.12, it never swallows the
  cancellation of its caller, which would then run for ever.
  """
  [result] = await together([coroutine], seconds)
  return result


def split_address(address: str) -> tuple[str, int]:
  """Returns host and port of 'host:port' or '[v6]:port'.

  Raises:
    ClusterConfigError: the address has another form.
  """
  with checks.reading('addresses'):
    return checks.split_address(address, 'an address', least_port=0)


async def dial(
  address: str,
  request: authentication.ConnectionRequest,
  credentials: authentication.Credentials,
) -> Connection:
  """Connects to a task's address and authenticates both sides.

  Raises:
    OSError: no process listens there, or it closed the connection.
    ProtocolError: another program listens there.
    AuthenticationError: the secrets differ; without secrets, the users differ.
    RendezvousError: the versions differ.
    ResourceLimitError: this process has no file descriptor left.
  """
  # A name and its host each have a deadline, so that the error tells them apart.
  places = await names.resolve(*split_address(address))
  return await within(
    authentication.HANDSHAKE_SECONDS,
    _dial(address, places, request, credentials),
  )


async def _dial(address, places, request, credentials) -> Connection:
  server = f'task {request.server} at {address}'
  connection = await _connect(places)
  try:
    handshake = authentication.Handshake(credentials.secret, request)
    connection.write(request.pack())
    answer = await connection.read(authentication.ANSWER_BYTES)
    proof = handshake.prove(answer, server)
    # Not before it answers: until it has accepted, the peer's end has no user.
    credentials.check_user(connection.sock)
    connection.write(proof)
    # The server's last word, so that a refusal is not taken for a breakdown.
    if await connection.read(1) != b'\1':
      raise errors.AuthenticationError(
        f'{server} refused the proof of this process. Fix: give all workers '
        'the same TFS_SECRET (or TFS_SECRET_FILE).'
      )
    return connection
  except BaseException:
    connection.close()
    raise


async def _connect(places: names.Places) -> Connection:
  problem: OSError = OSError('the name has no address')
  for place in places:
    try:
      return Connection(await sockets.connect(place))
    except OSError as e:
      problem = e
  raise problem


async def accept(
  connection: Connection, task: int, credentials: authentication.Credentials
) -> authentication.ConnectionRequest:
  """Does the server's side of the handshake. Returns the client's request."""
  data = await connection.read(authentication.REQUEST_BYTES)
  request = authentication.ConnectionRequest.unpack(data)
  if request.server != task:
    raise protocol.ProtocolError(f'it looks for task {request.server}')
  handshake = authentication.Handshake(credentials.secret, request)
  answer, expected = handshake.answer()
  connection.write(answer)
  credentials.check_user(connection.sock)
  proof = await connection.read(authentication.PROOF_BYTES)
  if not hmac.compare_digest(proof, expected):
    connection.write(b'\0')
    raise errors.AuthenticationError('its proof is wrong')
  connection.write(b'\1')
  return request
