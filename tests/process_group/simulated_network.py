"""A simulated network and clock for the real rendezvous, with up to 1,000 processes.

The protocol is not modelled: `Rendezvous`, `MembershipTable`, `Proposal`, the
handshake, the frames and the control plane are the real ones. Each process is an
object in one event loop. The simulation replaces the layers below: the clock, which
jumps to the next event, sockets with a delay for each pair, lost connections, hosts
that vanish, and pairs that are cut. Computation takes no time: all seconds are spent
waiting. Collectives do not run.
"""

import asyncio
import contextlib
import contextvars
import os
import random
import selectors
import socket
from unittest import mock

from tf_strategies import errors
from tf_strategies.process_group.network import names, server, sockets
from tf_strategies.process_group.rendezvous import rendezvous

# The process to which the running code belongs.
_calling = contextvars.ContextVar('process')


def run(function, *args):
  """Runs a coroutine function in a loop with a simulated clock."""
  loop, files = _Loop(), len(os.listdir('/proc/self/fd'))
  try:
    # Groups register an exit handler, but simulated processes have no exit.
    with mock.patch('atexit.register'):
      return loop.run_until_complete(function(*args))
  finally:
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    left = len(os.listdir('/proc/self/fd')) - files
    if left > 20:
      raise AssertionError(f'{left} files are still open')


class _Clock(selectors.DefaultSelector):
  """Advances the clock instead of waiting."""

  def __init__(self):
    super().__init__()
    self.now = 1000.0

  def select(self, timeout=None):
    if timeout is None:
      raise AssertionError('all processes wait forever')
    self.now += max(timeout, 0)
    return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
  """An event loop of simulated sockets."""

  def __init__(self):
    self._clock = _Clock()
    super().__init__(self._clock)

  def time(self):
    return self._clock.now

  async def sock_recv_into(self, sock, view):
    return await sock.receive_into(view)


class _Socket:
  """One end of a connection; bytes arrive in order, after a delay."""

  family = socket.AF_UNIX

  def __init__(self, process, network):
    self.process, self.peer = process, None
    self._network = network
    self._loop = network.loop
    self._arrived = bytearray()
    self._ended = False  # The other end is closed.
    self._closed = False
    self._wakes = None
    self._free_at = 0.0
    self._held = []  # Data that waits for the end of a cut.
    process.open_sockets.add(self)
    process.most_open = max(process.most_open, len(process.open_sockets))

  def setsockopt(self, *args):
    """Does nothing: simulated sockets have no options."""

  def setblocking(self, is_blocking):
    """Does nothing: simulated sockets never block."""

  def fileno(self):
    return id(self)

  def send(self, data):
    if self._closed:
      raise BrokenPipeError('the socket is closed')
    self._deliver(bytes(data))
    return len(data)

  def sendmsg(self, parts):
    """Drops the data of a data link: collectives do not run."""
    return sum(map(len, parts))

  def shutdown(self, how):
    self.close()

  def close(self):
    if self._closed:
      return
    self._deliver(None)
    self._closed = True
    self.process.open_sockets.discard(self)
    self._wake()

  def vanish(self):
    """Closes this end without notice to the peer, as a vanished host does."""
    self._closed = True
    self.process.open_sockets.discard(self)

  async def receive_into(self, view):
    while not self._arrived:
      if self._ended or self._closed:
        return 0
      self._wakes = self._loop.create_future()
      await self._wakes
    count = min(len(view), len(self._arrived))
    view[:count] = self._arrived[:count]
    del self._arrived[:count]
    return count

  def flush(self):
    """Delivers the data that the network held back."""
    held, self._held = self._held, []
    for data in held:
      self._deliver(data)

  def _deliver(self, data):
    delay = self._network.delay(self.process, self.peer.process)
    if delay is None:
      self._held.append(data)
      return
    # Data arrives in the order of sending.
    at = self._free_at = max(self._loop.time() + delay, self._free_at)
    if self.peer.process.is_alive:
      self._loop.call_at(at, self.peer.take, data)
    else:
      self._loop.call_at(
        at, self.take, None
      )  # The host does not know the connection.

  def take(self, data):
    """Receives bytes, or the end of the connection."""
    if data is None:
      self._ended = True
    else:
      self._arrived += data
    self._wake()

  def _wake(self):
    if self._wakes is not None and not self._wakes.done():
      self._wakes.set_result(None)


class _Server(server.Server):
  """A server in the simulated event loop, without a thread."""

  def _start(self):
    self.loop.close()
    self.loop = asyncio.get_running_loop()
    self.spawn(self._accept())

  def close(self):
    for task in self._tasks:
      task.cancel()
    self._listener.close()


class _Listener:
  """The listening address of a process."""

  def __init__(self, process, network):
    self.queue = asyncio.Queue()
    self._process, self._network = process, network
    network.listeners[process.task] = self

  def close(self):
    if self._network.listeners.get(self._process.task) is self:
      del self._network.listeners[self._process.task]


class Process:
  """One process of the job.

  Attributes:
    task: number of the task.
    group: the current or the last group.
    error: the error that ended its search for a group.
    most_open: maximum number of sockets open at the same time.
  """

  def __init__(self, network, task, options, progress=0):
    self.network, self.task, self.progress = network, task, progress
    self.open_sockets, self.most_open = set(), 0
    self.group = self.error = None
    self.is_alive = True
    self._context = contextvars.copy_context()
    self._context.run(_calling.set, self)
    self._meeting = self._context.run(
      rendezvous.Rendezvous, network.addresses, task, options
    )
    network.processes[task] = self
    self._searches = None

  def spawn(self, function, *args):
    """Runs a coroutine function in this process, until it dies."""
    self._searches = self._context.run(
      lambda: asyncio.ensure_future(function(*args))
    )
    return self._searches

  async def form(self, may_be_alone=True):
    """Leaves the current group and forms a new one."""
    if self.group is not None:
      await self.leave()
    try:
      self.group = await self._meeting._form(
        self.progress, False, may_be_alone, lambda: None
      )
    except errors.Error as e:
      self.error = e

  async def leave(self):
    """Closes the group, which `Rendezvous.form` does first."""
    group, self.group = self.group, None
    await group._control._close(has_ended=False)
    group._state.fail(rendezvous.state.CLOSED)
    group._transport.close()

  @property
  def is_in_group(self):
    """Returns whether the process is in a working group."""
    return self.group is not None and self.group._state.failure is None

  def kill(self):
    """Ends the process like SIGKILL: the host closes its open sockets."""
    self._end(lambda sock: sock.close())

  def vanish(self):
    """Ends the process like a power cut: peers get no notice."""
    self._end(lambda sock: sock.vanish())
    self.network.silent.add(self.task)

  def _end(self, end_socket):
    self.is_alive = False
    for sock in list(self.open_sockets):
      end_socket(sock)
    if self._searches is not None:
      self._searches.cancel()
    if self.group is not None:
      self.group._transport.close()  # Frees the memory of its links.
    self._meeting._server.close()


class Network:
  """The processes of a job and the network between them. A context manager.

  Args:
    count: number of tasks.
    seed: seed of all random values.
    lost: fraction of packets that are lost. The operating system resends packets
      of messages after 0.2 s, and of connection attempts after 1 s and more. A
      tenth of this fraction of the connection attempts fail.
  """

  def __init__(self, count, seed=0, lost=0.0):
    self.addresses = {t: f'10.{t >> 8}.{t & 255}.1:1' for t in range(count)}
    self._tasks = {(f'10.{t >> 8}.{t & 255}.1', 1): t for t in range(count)}
    self.rng = random.Random(seed)
    self.lost = lost
    self.processes, self.listeners = {}, {}
    self.silent, self.cuts = set(), set()
    self.loop = asyncio.get_running_loop()
    self._patches = contextlib.ExitStack()

  def __enter__(self):
    patch = mock.patch.object
    for replaced in (
      patch(rendezvous.server, 'Server', _Server),
      patch(server, 'listen', lambda *_: _Listener(_calling.get(), self)),
      patch(sockets, 'connect', self._connect),
      patch(sockets, 'accept', lambda listener: listener.queue.get()),
      patch(names, 'resolve', self._resolve),
      patch(sockets, 'allow', lambda count: None),
    ):
      self._patches.enter_context(replaced)
    return self

  def __exit__(self, *exc_info):
    for process in self.processes.values():
      if process.is_alive:
        process.kill()
    self._patches.close()

  def cut(self, some, others):
    """Cuts the network between two sets of processes."""
    self.cuts.update({frozenset((a, b)) for a in some for b in others})

  def heal(self):
    """Ends all cuts and delivers the data held back."""
    self.cuts.clear()
    for process in self.processes.values():
      for sock in list(process.open_sockets):
        sock.flush()

  def delay(self, src, dst):
    """Returns the seconds that a message takes, or None if it never arrives."""
    gone = {src.task, dst.task} & self.silent
    if gone or frozenset((src.task, dst.task)) in self.cuts:
      return None
    is_late = self.lost and self.rng.random() < self.lost
    return self.rng.uniform(2e-4, 1e-3) + 0.2 * is_late

  async def _resolve(self, host, port):
    return [(socket.AF_INET, (host, port))]

  async def _connect(self, target):
    _, address = target
    task, caller = self._tasks[address], _calling.get()
    pair = frozenset((caller.task, task))
    if task in self.silent or pair in self.cuts:
      await asyncio.sleep(60)
    retry = 1.0
    while self.lost and self.rng.random() < self.lost:
      await asyncio.sleep(retry)
      retry *= 2
    if self.lost and self.rng.random() < self.lost / 10:
      raise ConnectionResetError('the connection was lost')
    await asyncio.sleep(self.rng.uniform(4e-4, 2e-3))
    listener = self.listeners.get(task)
    if listener is None:
      raise ConnectionRefusedError('nobody listens there')
    mine = _Socket(caller, self)
    mine.peer = _Socket(self.processes[task], self)
    mine.peer.peer = mine
    listener.queue.put_nowait(mine.peer)
    return mine
