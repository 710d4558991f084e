"""Runs a job from its start to its end, within a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks import processes
from benchmarks.strategy_costs import catalogue
from tf_strategies import errors

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TASK = 'benchmarks.strategy_costs.task'
_POLL_SECONDS = 0.25
# What the launcher gives its tasks; it gets twice that.
_GRACE_SECONDS = 5.0
_TAIL_LINES = 20
_ERROR = re.compile(r'\w*(Error|Exception): .*')


@dataclasses.dataclass(frozen=True)
class Finished:
  """A job that has ended well.

  Attributes:
    reports: of the tasks that trained, by rank.
    peak_rss_bytes: the most memory that a task had at a time.
    seconds: from its start to its end.
  """

  reports: Sequence[dict[str, Any]]
  peak_rss_bytes: int
  seconds: float


def run(
  job: catalogue.Job, spec: dict[str, Any], deadline_seconds: float
) -> Finished:
  """Runs a job: one process, or the launcher and its tasks.

  No process of it is left, however it ends.

  Args:
    job: what to run.
    spec: fields of `task.Spec`, without `output_dir`.
    deadline_seconds: how long it may take.

  Raises:
    WorkerUnavailableError: it failed, or did not end in time; says what it
      wrote last.
  """
  started = time.monotonic()
  with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    spec = {**spec, 'output_dir': directory}
    command = stack.enter_context(_start(job, spec))
    peak = _Peak(command.pid)
    while command.is_alive():
      if time.monotonic() - started > deadline_seconds:
        raise _failed(
          job, f'did not end within {deadline_seconds:g} s', command
        )
      peak.look()
      time.sleep(_POLL_SECONDS)
    if status := command.wait():
      raise _failed(job, f'ended with status {status}', command)
    reports = [
      json.loads(path.read_text(encoding='utf-8'))
      for path in pathlib.Path(directory).glob('*.json')
    ]
  if not reports:
    raise _failed(job, 'ended without a report', command)
  return Finished(
    sorted(reports, key=lambda r: r['rank']),
    peak.num_bytes,
    time.monotonic() - started,
  )


def _start(job: catalogue.Job, spec: dict[str, Any]) -> processes.Command:
  words = [sys.executable, '-m', _TASK, json.dumps(spec)]
  if job.launcher_flags:
    launch = [sys.executable, '-m', 'tf_strategies.launch']
    grace = f'--grace_period={_GRACE_SECONDS}'
    words = [*launch, *job.launcher_flags, grace, '--', *words]
  return processes.Command(
    words,
    name=job.name,
    cwd=_ROOT,
    # The launcher then ends its tasks.
    grace_seconds=2 * _GRACE_SECONDS,
    # Ctrl-C is for this process, which then ends the job.
    start_new_session=True,
  )


class _Peak:
  """The most memory that a process of a tree has had.

  Linux tells each process's own peak; elsewhere it is the most that was seen.

  Args:
    pid: of the root.
  """

  def __init__(self, pid: int):
    self.num_bytes = 0
    self._root = psutil.Process(pid)

  def look(self) -> None:
    """Looks at all processes of the tree now."""
    with contextlib.suppress(psutil.NoSuchProcess):
      for process in [self._root, *self._root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
          self.num_bytes = max(self.num_bytes, _peak_bytes(process))


def _peak_bytes(process: psutil.Process) -> int:
  try:
    with open(f'/proc/{process.pid}/status', encoding='utf-8') as f:
      for line in f:
        if line.startswith('VmHWM:'):
          return 1024 * int(line.split()[1])
  except OSError:
    pass  # Not Linux, or gone.
  return process.memory_info().rss


def _failed(
  job: catalogue.Job, what: str, command: processes.Command
) -> errors.WorkerUnavailableError:
  lines = command.output().splitlines()
  found = [m for m in map(_ERROR.search, lines) if m]
  reason = f': {found[-1][0]}' if found else ''
  tail = '\n'.join(lines[-_TAIL_LINES:])
  return errors.WorkerUnavailableError(
    f'{job.name} {what}{reason}\nIt wrote last:\n{tail}\nLeave {job.name} out, '
    'or pass a longer --deadline_seconds.'
  )
