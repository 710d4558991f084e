"""Runs the launcher as a user does, with a deadline, and provides tasks."""

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

import psutil
from absl.testing import parameterized

from benchmarks import processes
from tf_strategies.launch import ports as ports_lib

DEADLINE_SECONDS = 120.0
SECRET = '5ec7e7' * 8
# A task that all-reduces numbers.
SUM = """
import numpy as np
from tf_strategies import cluster, process_group
config = cluster.ClusterConfig.from_env()
addresses = {i: t.address for i, t in enumerate(config.training_tasks)}
rendezvous = process_group.Rendezvous(
  addresses, config.training_index, process_group.GroupOptions.from_env())
group = rendezvous.form()
values = config.training_index * 1000 + np.arange(3.0)
print('the sum is', group.all_reduce(values).tolist(), flush=True)
group.barrier(name='the end')
group.close()
rendezvous.close()
"""
HELPERS = """
import json, os, signal, subprocess, sys, time
directory = sys.argv[1]
config = json.loads(os.environ.get('TF_CONFIG', '{}'))
task = config.get('task', {'type': 'worker', 'index': 0})
name = f"{task['type']}_{task['index']}"
attempt = int(os.environ['TFS_RESTART_COUNT'])

def note(key, value):
  path = os.path.join(directory, f'{key}-{name}-{attempt}')
  with open(path + '~', 'w') as f:
    json.dump(value, f)
  os.rename(path + '~', path)

def wait_for(key, writer, of_attempt=0):
  path = os.path.join(directory, f'{key}-{writer}-{of_attempt}')
  while not os.path.exists(path):
    time.sleep(0.01)
  with open(path) as f:
    return json.load(f)

note('pid', os.getpid())
"""


class Launcher(processes.Command):
  """A running launcher whose tasks run Python code. A context manager.

  Args:
    directory: directory of the notes of tasks and of the launcher's output.
    flags: flags of the launcher.
    code: code that each task runs. It can use `task`, `name` (such as `worker_0`),
      `attempt`, `note(key, value)` and `wait_for(key, writer)`.
    environment: changes to the launcher's environment.
    stdout: stream to use instead of a file.
  """

  def __init__(self, directory, flags, code, environment=None, stdout=None):
    self.directory = pathlib.Path(directory)
    script = self.directory / 'task.py'
    script.write_text(HELPERS + code, encoding='utf-8')
    command = [sys.executable, '-I', '-S', str(script), str(directory)]
    super().__init__(
      _words([*flags, '--', *command]),
      name='launch',
      log=self.directory / 'stdout',
      error_log=self.directory / 'stderr',
      env=processes.python_environment(environment),
      deadline_seconds=DEADLINE_SECONDS,
      # SIGTERM first, so that the launcher ends its tasks.
      grace_seconds=30.0,
      **({} if stdout is None else {'stdout': stdout}),
    )

  def close(self):
    super().close()
    for pid in self.pids():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def notes(self, key: str) -> dict[str, object]:
    """Returns the notes of tasks with this key, by `<task>-<attempt>`."""
    return {
      path.name.partition('-')[2]: json.loads(path.read_text(encoding='utf-8'))
      for path in sorted(self.directory.glob(f'{key}-*'))
      if not path.name.endswith('~')
    }

  def wait_for_notes(self, key: str, count: int) -> dict[str, object]:
    """Waits until `count` tasks have written a note with this key."""
    self.wait_until(lambda: len(self.notes(key)) >= count)
    return self.notes(key)

  def wait_until(self, condition: Callable[[], bool]) -> None:
    """Waits until `condition()`, also after the end of the launcher."""
    while not condition():
      if time.monotonic() > self._ends_at:
        self.fail(f'did not meet the condition in time:\n{self.stderr()}')
      time.sleep(0.01)

  def stdout(self) -> bytes:
    """Returns the output of the launcher on stdout so far."""
    return (self.directory / 'stdout').read_bytes()

  def stderr(self) -> str:
    """Returns the output of the launcher on stderr so far."""
    return (self.directory / 'stderr').read_text(encoding='utf-8')

  def pids(self) -> list[int]:
    """Returns the processes in the notes of tasks."""
    return [*self.notes('pid').values(), *self.notes('grandchild').values()]

  def alive(self) -> list[int]:
    """Returns the processes in the notes that still run."""
    return [pid for pid in self.pids() if is_running(pid)]

  def reapers(self) -> list[psutil.Process]:
    """Returns the children of the launcher."""
    return psutil.Process(self.process.pid).children()


class JobTestCase(parameterized.TestCase):
  def assert_ends(self, launcher, status, *words):
    """Checks the status and messages of a launcher, and that no task is left."""
    self.assertEqual(launcher.wait(), status, launcher.stderr())
    for word in words:
      self.assertIn(word, launcher.stderr())
    self.assertEmpty(launcher.alive())


def launchers(
  directory, code, flags=(), count=1, ranks=None, secrets=None, address=None
) -> Iterator[Launcher]:
  """Starts the launchers of a job of several hosts, all on this machine.

  Args:
    directory: directory of the notes. Each launcher has its own subdirectory.
    code: code that each task runs, as for `Launcher`.
    flags: flags of all launchers.
    count: number of hosts.
    ranks: hosts whose launchers are started. All by default.
    secrets: secret of each launcher, if they differ.
    address: rendezvous address. A free one by default.
  """
  address = address or f'127.0.0.1:{ports_lib.pick_ports(1)[0]}'
  for position, rank in enumerate(range(count) if ranks is None else ranks):
    own_directory = pathlib.Path(directory, str(position))
    own_directory.mkdir()
    words = [*flags]
    if count > 1:
      words += [f'--nnodes={count}', f'--node_rank={rank}']
      words.append(f'--rendezvous={address}')
    secret = secrets[position] if secrets else SECRET
    yield Launcher(own_directory, words, code, {'TFS_SECRET': secret})


def is_running(pid: int) -> bool:
  """Returns whether a process exists and is not a zombie."""
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def with_argument(argument: str) -> list[int]:
  """Returns the running processes that have this argument."""
  found = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
      if argument in process.cmdline() and is_running(process.pid):
        found.append(process.pid)
  return found


def _words(arguments):
  return [sys.executable, '-m', 'tf_strategies.launch', *arguments]


def run(arguments, environment=None) -> tuple[int, str, str]:
  """Runs the launcher. Returns the exit status, stdout and stderr."""
  done = processes.run(
    _words(arguments),
    name='launch',
    env=processes.python_environment(environment),
    deadline_seconds=DEADLINE_SECONDS,
  )
  return done.returncode, done.stdout, done.stderr
