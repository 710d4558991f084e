"""Runs a job from its start to its end, within a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import psutil

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
    log = pathlib.Path(directory, 'log')
    process = _start(job, spec, log)
    stack.callback(_end, process)
    peak = _Peak(process.pid)
    while process.poll() is None:
      if time.monotonic() - started > deadline_seconds:
        raise _failed(job, f'did not end within {deadline_seconds:g} s', log)
      peak.look()
      time.sleep(_POLL_SECONDS)
    if process.returncode:
      raise _failed(job, f'ended with status {process.returncode}', log)
    reports = [
      json.loads(path.read_text(encoding='utf-8'))
      for path in pathlib.Path(directory).glob('*.json')
    ]
  if not reports:
    raise _failed(job, 'ended without a report', None)
  return Finished(
    sorted(reports, key=lambda r: r['rank']),
    peak.num_bytes,
    time.monotonic() - started,
  )


def _start(
  job: catalogue.Job, spec: dict[str, Any], log: pathlib.Path
) -> subprocess.Popen:
  command = [sys.executable, '-m', _TASK, json.dumps(spec)]
  if job.launcher_flags:
    launch = [sys.executable, '-m', 'tf_strategies.launch']
    grace = f'--grace_period={_GRACE_SECONDS}'
    command = [*launch, *job.launcher_flags, grace, '--', *command]
  # Tasks talk to each other directly, and are told of their cluster by the
  # launcher alone.
  env = {
    k: v
    for k, v in os.environ.items()
    if k != 'TF_CONFIG' and not k.lower().endswith('_proxy')
  }
  env['TF_CPP_MIN_LOG_LEVEL'] = '2'
  with open(log, 'wb') as f:
    return subprocess.Popen(
      command,
      cwd=_ROOT,
      env=env,
      stdin=subprocess.DEVNULL,
      stdout=f,
      stderr=subprocess.STDOUT,
      # Ctrl-C is for this process, which then ends the job.
      start_new_session=True,
    )


def _end(process: subprocess.Popen) -> None:
  """Ends the process and all below it, by their own process ids."""
  if process.poll() is not None:
    return  # No task outlives the launcher.
  root = psutil.Process(process.pid)
  below = root.children(recursive=True)
  process.terminate()  # The launcher then ends its tasks.
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(2 * _GRACE_SECONDS)
  if process.poll() is None:
    below += root.children(recursive=True)
    process.kill()
  for left in below:
    with contextlib.suppress(psutil.NoSuchProcess):
      left.kill()  # Not if another process has its id by now.
  process.wait(_GRACE_SECONDS)
  psutil.wait_procs(below, _GRACE_SECONDS)


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
  job: catalogue.Job, what: str, log: pathlib.Path | None
) -> errors.WorkerUnavailableError:
  lines = []
  if log is not None:
    lines = log.read_text(encoding='utf-8', errors='replace').splitlines()
  found = [m for m in map(_ERROR.search, lines) if m]
  reason = f': {found[-1][0]}' if found else ''
  tail = '\n'.join(lines[-_TAIL_LINES:])
  return errors.WorkerUnavailableError(
    f'{job.name} {what}{reason}\nIt wrote last:\n{tail}\nLeave {job.name} out, '
    'or pass a longer --deadline_seconds.'
  )
