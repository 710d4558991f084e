"""Processes that measure one variant each, none of which is waited for in vain.

Every request has a deadline; a process that misses it is killed, and so are all
when the benchmark ends. CPU time and memory are looked at from outside, of the
process and its own children (a DataLoader's workers), with psutil.

Example:

  >>> import sys
  >>> from benchmarks.input_pipeline import children
  >>> echo = 'import sys; [print(line, end="", flush=True) for line in sys.stdin]'
  >>> with children.Child('echo', [sys.executable, '-c', echo], 30) as child:
  ...   child.ask({'value': 7})
  7
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import processes
from benchmarks.input_pipeline import torch_peer
from tf_strategies import errors

_POLL_SECONDS = 0.1
_GOODBYE_SECONDS = 5.0
_TAIL_BYTES = 600
_MODULE = 'benchmarks.input_pipeline.child'


def tensorflow_command() -> list[str]:
  """Starts a process that measures a variant of tf.data."""
  return [sys.executable, '-m', _MODULE]


def torch_command(python: str) -> list[str]:
  """Starts a process that measures a DataLoader, in another interpreter."""
  return [python, os.path.abspath(torch_peer.__file__)]


class Child:
  """A process that answers a line of JSON with a line of JSON.

  Args:
    name: of the variant, for messages.
    command: what to run.
    deadline_s: how long each answer may take.

  Attributes:
    cpu_share: CPU seconds a second while the last request was answered; None
      without psutil.
    peak_rss: the most bytes of memory that were seen.
  """

  def __init__(self, name: str, command: Sequence[str], deadline_s: float):
    self.name = name
    self.cpu_share: float | None = None
    self.peak_rss: int | None = None
    self._deadline_s = deadline_s
    self._received = b''
    try:
      self._command = processes.Command(
        command,
        name=name,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is for this process, which then ends it.
        start_new_session=True,
      )
    except errors.WorkerUnavailableError as e:
      raise errors.WorkerUnavailableError(
        f'{e} Or leave this variant out of --variants.'
      ) from e
    self._process = self._command.process

  def send(self, request: dict[str, Any]) -> None:
    """Asks; `receive` waits for the answer.

    Raises:
      WorkerUnavailableError: the process is gone.
    """
    try:
      self._process.stdin.write(json.dumps(request).encode() + b'\n')
      self._process.stdin.flush()
    except OSError:
      self._fail('ended by itself')

  def receive(self) -> Any:
    """Waits for an answer.

    Raises:
      WorkerUnavailableError: none came before the deadline, or the process
        ended.
      DataError: the request failed.
    """
    began, cpu = time.monotonic(), self._cpu_seconds()
    while b'\n' not in self._received:
      if time.monotonic() - began > self._deadline_s:
        self._fail(f'did not answer within {self._deadline_s:g} s')
      ready, _, _ = select.select([self._process.stdout], [], [], _POLL_SECONDS)
      self._look_at_memory()
      if ready:
        more = os.read(self._process.stdout.fileno(), 1 << 16)
        if not more:
          self._fail('ended by itself')
        self._received += more
    seconds = time.monotonic() - began
    after = self._cpu_seconds()
    if cpu is not None and after is not None:
      self.cpu_share = (after - cpu) / max(seconds, 1e-9)
    line, _, self._received = self._received.partition(b'\n')
    answer = json.loads(line)
    if 'error' in answer:
      raise errors.DataError(f'{self.name}: {answer["error"]}')
    return answer['value']

  def ask(self, request: dict[str, Any]) -> Any:
    """Sends and receives."""
    self.send(request)
    return self.receive()

  def close(self) -> None:
    """Ends the process and its children; may be called twice."""
    for pipe in (self._process.stdin, self._process.stdout):
      with contextlib.suppress(OSError):
        pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(_GOODBYE_SECONDS)
    self._command.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _fail(self, what: str) -> None:
    status = self._command.kill_all()
    said = self._command.tail(_TAIL_BYTES)
    raise errors.WorkerUnavailableError(
      f'{self.name} {what} (status {status}). Pass a longer --deadline, or '
      f'leave it out of --variants. It wrote last: {said or "nothing"}'
    )

  def _tree(self) -> Iterator[Any]:
    try:
      import psutil
    except ImportError:
      return  # The columns stay empty.
    try:
      process = psutil.Process(self._process.pid)
      yield process
      yield from process.children(recursive=True)
    except psutil.Error:
      return

  def _cpu_seconds(self) -> float | None:
    total = None
    for process in self._tree():
      with contextlib.suppress(Exception):  # It has just ended.
        times = process.cpu_times()
        total = (total or 0.0) + times.user + times.system
    return total

  def _look_at_memory(self) -> None:
    total = 0
    for process in self._tree():
      with contextlib.suppress(Exception):  # It has just ended.
        total += process.memory_info().rss
    if total:
      self.peak_rss = max(self.peak_rss or 0, total)
