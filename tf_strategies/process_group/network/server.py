"""The thread and the listening socket that accept a process's connections."""

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from absl import logging

from tf_strategies import errors
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import protocol, sockets

# Largest number of connections that have not authenticated yet: in all, or for each
# worker if there are many, since all may come at once. The oldest makes room for a new
# one, so that a peer that opens many and stays silent blocks nobody.
_MAX_UNAUTHENTICATED = 128
_MAX_UNAUTHENTICATED_PER_WORKER = 4
# The predecessor of a restarted worker may still be ending.
_BUSY_SECONDS = 2.0
# A container may start before its own name is known.
_NAMELESS_SECONDS = 20.0


class Server:
  """One thread with an event loop for all connections except data links.

  Args:
    address: address of this task.
    task: number of this task.
    options: options of this process, which have its secret.
    handlers: for each kind of a connection's first frame a coroutine function that gets
      the authenticated connection, which it owns from then on, the number of the client
      and that frame's message.
    on_shortage: called repeatedly while no file descriptor is left for a connection.
    num_peers: number of tasks that may connect.
    listener: a socket that listens at the address already; None to open one.
  """

  def __init__(
    self,
    address: str,
    task: int,
    options: options_lib.GroupOptions,
    handlers: Mapping[protocol.Kind, Callable],
    on_shortage: Callable[[errors.ResourceLimitError], None] | None = None,
    num_peers: int = 0,
    listener: socket.socket | None = None,
  ):
    self._task = task
    self._max_unauthenticated = max(
      _MAX_UNAUTHENTICATED, num_peers * _MAX_UNAUTHENTICATED_PER_WORKER
    )
    self._options = options
    self._on_shortage = on_shortage
    self._handlers = handlers
    self._unauthenticated: dict[asyncio.Task, None] = {}  # The oldest first.
    self._tasks: set[asyncio.Task] = set()
    self._listener = listener or listen(address, task)
    self.loop = asyncio.new_event_loop()
    self._start()

  def _start(self) -> None:
    self._thread = threading.Thread(
      target=self._run, name=f'process_group task {self._task}', daemon=True
    )
    self._thread.start()

  def now(self) -> float:
    """Returns the loop's time, in seconds."""
    return self.loop.time()

  def call(self, coroutine: Coroutine) -> Any:
    """Runs a coroutine in the loop and waits for its result."""
    if not self._thread.is_alive():
      # Closed; or this process was forked from the one that has the thread.
      coroutine.close()
      raise RuntimeError('the rendezvous is closed')
    future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
    try:
      return errors.result_of(future)
    finally:
      # After an interrupt the coroutine must not go on without its caller.
      future.cancel()

  def spawn(self, coroutine: Coroutine) -> asyncio.Task:
    """Starts a task that ends with the server; inside the loop only."""
    task = self.loop.create_task(coroutine)
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return task

  def close(self) -> None:
    """Ends all tasks, the thread and the listening socket."""
    if not self._thread.is_alive():
      return
    self.loop.call_soon_threadsafe(self.loop.stop)
    self._thread.join()

  def _run(self) -> None:
    asyncio.set_event_loop(self.loop)
    self.spawn(self._accept())
    try:
      self.loop.run_forever()
      self.loop.run_until_complete(connection_lib.end(self._tasks))
    finally:
      self._listener.close()
      self.loop.close()

  async def _accept(self) -> None:
    while True:
      try:
        sock = await sockets.accept(self._listener)
      except (OSError, errors.ResourceLimitError) as e:
        # Those in use may be given back.
        if isinstance(e, errors.ResourceLimitError) and self._on_shortage:
          self._on_shortage(e)
        logging.log_every_n_seconds(
          logging.WARNING, 'Task %d cannot accept: %s', 10, self._task, e
        )
        await asyncio.sleep(0.1)
        continue
      task = self.spawn(self._serve(connection_lib.Connection(sock)))
      self._unauthenticated[task] = None
      task.add_done_callback(lambda t: self._unauthenticated.pop(t, None))
      if len(self._unauthenticated) > self._max_unauthenticated:
        # Until it has closed its socket: else they could pile up.
        await connection_lib.end([next(iter(self._unauthenticated))])

  async def _serve(self, connection: connection_lib.Connection) -> None:
    seconds = connection_lib.HANDSHAKE_SECONDS
    try:
      client = await connection_lib.within(
        seconds, connection_lib.accept(connection, self._task, self._options)
      )
      self._unauthenticated.pop(asyncio.current_task(), None)
      kind, message = await connection_lib.within(
        seconds, connection.expect(*self._handlers)
      )
      await self._handlers[kind](connection, client, message)
    except asyncio.CancelledError:
      connection.close()
      raise
    except (OSError, protocol.ProtocolError, errors.AuthenticationError) as e:
      connection.close()
      logging.log_every_n_seconds(
        logging.WARNING,
        'Task %d refused a connection: %s',
        10,
        self._task,
        e or 'no proof in time',
      )
    except Exception:  # A member of the job sent what this version does not.
      connection.close()
      logging.exception('Task %d cannot serve a connection.', self._task)


def listen(address: str, task: int) -> socket.socket:
  """Returns a listener at a task's own address. Raises RendezvousError with a fix."""
  started = time.monotonic()
  place = connection_lib.split_address(address)
  while True:
    try:
      return sockets.listen(*place)
    except OSError as e:
      busy = e.errno == errno.EADDRINUSE
      is_ours = busy and sockets.listens(*place)
      patience = _BUSY_SECONDS if busy and not is_ours else 0.0
      if isinstance(e, socket.gaierror):
        patience = _NAMELESS_SECONDS
      if time.monotonic() < started + patience:
        time.sleep(0.1)
        continue
      hint = 'Expected an address of this host. Fix: check which task it is.'
      if is_ours:
        hint = (
          'This process listens there itself, for a strategy or a rendezvous '
          'that is still open. Fix: close() that one first, or go on with it.'
        )
      elif busy:
        hint = (
          'Another process has it: a second one that claims the same task, or '
          'one of another job. Fix: end that one, or choose another port.'
        )
      raise errors.RendezvousError(
        f'Task {task} cannot listen at {address}: {e.strerror or e}. {hint}'
      ) from e
