"""Authenticated connections with frames, inside an event loop.

Both ends prove by HMAC that they know the secret of the job. The client calls with a
nonce; the server answers with a nonce of its own and a keyed hash over both and its
role; the client answers with a hash in its role. Neither side learns anything that it
could replay: in another role, to another task or later. This authenticates; it does
not encrypt.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Collection, Coroutine, Iterable
from typing import Any

from tf_strategies import errors
from tf_strategies.cluster import checks
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group.network import (
  local_users,
  names,
  protocol,
  sockets,
)

# Time for the whole handshake.
HANDSHAKE_SECONDS = 5.0

PROOF_BYTES = 32
_MAGIC = b'TFSH'
# The version of the client, the numbers of client and server, and a nonce.
CALL = struct.Struct('!4sHII32s')
# The version of the server, its nonce and its proof.
ANSWER = struct.Struct(f'!4sH32s{PROOF_BYTES}s')


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
    if not self._broken:
      self._unsent += data
      self._flush()

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
      pass
    except OSError:
      self._give_up()
    if self._unsent:
      self._loop.add_writer(self.sock, self._flush)
    else:
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
    await end(tasks)


async def end(tasks: Collection[asyncio.Task]) -> None:
  """Cancels tasks, and waits for their ends. Their exceptions count as seen."""
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
  address: str, client: int, server: int, options: options_lib.GroupOptions
) -> Connection:
  """Connects a task to another one's address and authenticates both sides.

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
    HANDSHAKE_SECONDS, _dial(address, places, client, server, options)
  )


async def _dial(address, places, client, server, options) -> Connection:
  connection = await _connect(places)
  try:
    await call(connection, address, client, server, options)
    return connection
  except BaseException:
    connection.close()
    raise


async def _connect(places: names.Places) -> Connection:
  for place in places:  # At least one.
    try:
      return Connection(await sockets.connect(place))
    except OSError as e:
      problem = e
  raise problem


async def call(
  connection: Connection,
  address: str,
  client: int,
  server: int,
  options: options_lib.GroupOptions,
) -> None:
  """Does the client's side of the handshake; raises as `dial`."""
  name = f'task {server} at {address}'
  nonce = secrets.token_bytes(32)
  called = CALL.pack(_MAGIC, protocol.PROTOCOL_VERSION, client, server, nonce)
  connection.write(called)
  answer = ANSWER.unpack(await connection.read(ANSWER.size))
  magic, version, nonce, proof = answer
  if magic != _MAGIC:
    raise protocol.ProtocolError(f'{name} is no worker of tf_strategies')
  if version != protocol.PROTOCOL_VERSION:
    raise errors.RendezvousError(
      f'Expected version {protocol.PROTOCOL_VERSION} of the protocol, got '
      f'version {version} from {name}. Fix: install the same tf_strategies '
      'everywhere.'
    )
  if not hmac.compare_digest(proof, _proof(options, b'server', called, nonce)):
    raise errors.AuthenticationError(
      f'{name} does not know the secret of this process: its proof is '
      'wrong. Fix: give all workers the same TFS_SECRET (or '
      'TFS_SECRET_FILE).'
    )
  # Not before it answers: until it has accepted, the peer's end has no user.
  _check_user(connection, options)
  connection.write(_proof(options, b'client', called, nonce))
  # The server's last word, so that a refusal is not taken for a breakdown.
  if await connection.read(1) != b'\1':
    raise errors.AuthenticationError(
      f'{name} refused the proof of this process. Fix: give all workers '
      'the same TFS_SECRET (or TFS_SECRET_FILE).'
    )


async def accept(
  connection: Connection, task: int, options: options_lib.GroupOptions
) -> int:
  """Does the server's side of the handshake. Returns the client's number."""
  called = await connection.read(CALL.size)
  magic, _, client, server, _ = CALL.unpack(called)
  if magic != _MAGIC:
    raise protocol.ProtocolError(f'it began with {magic!r}')
  if server != task:
    raise protocol.ProtocolError(f'it looks for task {server}')
  nonce = secrets.token_bytes(32)
  proof = _proof(options, b'server', called, nonce)
  connection.write(ANSWER.pack(_MAGIC, protocol.PROTOCOL_VERSION, nonce, proof))
  _check_user(connection, options)
  proof = await connection.read(PROOF_BYTES)
  if not hmac.compare_digest(proof, _proof(options, b'client', called, nonce)):
    connection.write(b'\0')
    raise errors.AuthenticationError('its proof is wrong')
  connection.write(b'\1')
  return client


def _proof(options, role: bytes, called: bytes, nonce: bytes) -> bytes:
  """Returns what only those can say who know the secret."""
  message = b'tf_strategies ' + role + called + nonce
  return hmac.digest(options.secret or b'', message, 'sha256')


def _check_user(connection, options) -> None:
  """Raises AuthenticationError if the peer's user is not trusted."""
  if options.same_user:
    local_users.check(connection.sock)
