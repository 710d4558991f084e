"""Worker processes that wait for commands and end with their pool.

Peers of one run take turns, and some cannot share a process (TensorFlow's cluster
runtime, torch, MPI). Each therefore has its own pool of processes, which block on a
socket while others have their turn.

  with worker_pool.WorkerPool('ours', 'package.module:Actor', ['', '']) as workers:
    workers.send('greet', name='you')      # Actor(rank).greet(name='you')
    answers = workers.receive()            # the results, by rank

Commands and answers are JSON over a Unix socket in a private directory, so a worker may
be in another network namespace, or be started by mpiexec.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import processes
from tf_strategies import errors

DEADLINE_SECONDS = 300.0

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.2
_GOODBYE_SECONDS = 5.0
_TAIL_BYTES = 4000


class WorkerPool:
  """Processes that run the methods of a class in parallel.

  They are ended when the pool is closed and after a deadline. They also end when
  this process has ended, even while they run a method.

  Args:
    name: name in messages.
    actor: 'module:Class'. Each process creates one with its rank, or with None if
      only the launcher knows the rank.
    prefixes: for each rank the words before the interpreter, such as
      `('ip', 'netns', 'exec', 'host')`. Often empty.
    python: the interpreter of the workers.
    launcher: a command that starts all workers, such as `('mpiexec', '-n', '2')`.
    env: environment variables of the workers, in addition to this process's.
    deadline_seconds: maximum duration of the start and of each command.

  Raises:
    WorkerUnavailableError: if a worker did not start.
  """

  def __init__(
    self,
    name: str,
    actor: str,
    prefixes: Sequence[Sequence[str]],
    python: str = sys.executable,
    launcher: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
  ):
    self.name = name
    self.size = len(prefixes)
    self._deadline_seconds = deadline_seconds
    self._stack = contextlib.ExitStack()
    self._processes: list[processes.Command] = []
    self._links: list[_Link] = []
    try:
      directory = self._stack.enter_context(tempfile.TemporaryDirectory())
      self._directory = pathlib.Path(directory)
      path = str(self._directory / 'pool')
      listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
      listener.bind(path)
      listener.listen(self.size)
      command = [python, '-m', 'benchmarks.pool_worker', path, actor]
      self._start(command, prefixes, launcher, processes.environment(env))
      self._accept(listener)
    except BaseException:
      self.close()
      raise

  def send(self, method: str, **arguments: Any) -> None:
    """Starts a method on all workers. `receive` waits for it.

    Args:
      method: name of a method of the actor.
      **arguments: its arguments, which JSON must support.
    """
    for link in self._links:
      try:
        link.send({'method': method, 'arguments': arguments})
      except OSError:
        self._raise(link.rank, 'is gone')

  def receive(self) -> list[Any]:
    """Returns the results of the method, by rank.

    Raises:
      WorkerUnavailableError: if a worker raised, died, or did not answer in time.
    """
    ends_at = time.monotonic() + self._deadline_seconds
    answers: dict[int, Any] = {}
    waiting = list(self._links)
    while waiting:
      for link in list(waiting):
        # Polls in turns, because workers may wait for one that raised.
        answer = self._poll(link, ends_at)
        if answer is not None:
          answers[link.rank] = answer['value']
          waiting.remove(link)
    return [answers[link.rank] for link in self._links]

  def ask(self, method: str, **arguments: Any) -> list[Any]:
    """Runs a method on all workers, and returns the results by rank."""
    self.send(method, **arguments)
    return self.receive()

  def close(self) -> None:
    """Ends all workers by their process ids. May be called twice."""
    for link in self._links:
      link.close()  # A worker ends when its link closes.
    self._links = []
    ends_at = time.monotonic() + _GOODBYE_SECONDS
    for process in self._processes:
      while process.is_alive() and time.monotonic() < ends_at:
        time.sleep(_POLL_SECONDS / 10)
      process.close()
    self._stack.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _start(self, command, prefixes, launcher, env) -> None:
    ranks: list[tuple[list[str], str]] = [
      ([*prefix, *command], str(rank)) for rank, prefix in enumerate(prefixes)
    ]
    if launcher:
      ranks = [([*launcher, *command], 'any')]
    for number, (words, rank) in enumerate(ranks):
      self._processes.append(
        processes.Command(
          [*words, rank],
          name=self.name,
          log=self._directory / f'{number}.log',
          cwd=_ROOT,
          env=env,
          # Only this process receives Ctrl-C. It then ends the workers.
          start_new_session=True,
        )
      )

  def _accept(self, listener: socket.socket) -> None:
    ends_at = time.monotonic() + self._deadline_seconds
    listener.settimeout(_POLL_SECONDS)
    links = []
    while len(links) < self.size:
      try:
        connection, _ = listener.accept()
      except TimeoutError:
        self._check_start(ends_at, len(links))
        continue
      link = _Link(connection)
      # Added now, so that `close` also closes it after an error.
      self._links.append(link)
      links.append(link)
      hello = link.receive(_GOODBYE_SECONDS)
      if hello is None:
        self._raise(None, 'did not say who it is')
      rank = hello['rank']
      link.rank = len(links) - 1 if rank is None else rank
    self._links.sort(key=lambda link: link.rank)

  def _check_start(self, ends_at: float, started: int) -> None:
    for number, process in enumerate(self._processes):
      if not process.is_alive():
        status = process.process.returncode
        self._raise(number, f'ended with status {status} at once')
    if time.monotonic() > ends_at:
      self._raise(None, f'is missing: {started} of {self.size} came in time')

  def _poll(self, link: _Link, ends_at: float) -> dict | None:
    try:
      answer = link.receive(_POLL_SECONDS)
    except ConnectionError:
      self._raise(link.rank, 'died')
    if answer is not None and 'error' in answer:
      self._raise(link.rank, f'failed:\n{answer["error"]}')
    if answer is None and time.monotonic() > ends_at:
      self._raise(
        link.rank, f'did not answer within {self._deadline_seconds:g} s'
      )
    return answer

  def _raise(self, rank: int | None, what: str) -> None:
    who = 'a worker' if rank is None else f'worker {rank}'
    said = ''.join(self._tail(n) for n in range(len(self._processes)))
    error = errors.WorkerUnavailableError(
      f'{self.name}: {who} {what}. What the workers wrote last:\n{said}'
      'Run it again without this one, or with a longer --deadline_seconds.'
    )
    error.rank = rank
    raise error

  def _tail(self, number: int) -> str:
    text = self._processes[number].tail(_TAIL_BYTES)
    return f'[{number}] {text}\n' if text else ''


class _Link:
  """The socket to one worker."""

  def __init__(self, connection: socket.socket):
    self.rank = -1
    self._socket = connection
    self._received = b''

  def send(self, message: dict) -> None:
    self._socket.settimeout(_GOODBYE_SECONDS)
    self._socket.sendall(json.dumps(message).encode() + b'\n')

  def receive(self, seconds: float) -> dict | None:
    """Returns a message, or None if none arrived in time.

    Raises:
      ConnectionError: if the worker has closed the connection.
    """
    self._socket.settimeout(seconds)
    try:
      while b'\n' not in self._received:
        more = self._socket.recv(1 << 16)
        if not more:
          raise ConnectionError
        self._received += more
    except TimeoutError:
      return None
    line, _, self._received = self._received.partition(b'\n')
    return json.loads(line)

  def close(self) -> None:
    self._socket.close()
