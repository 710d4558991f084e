"""A parameter server job in real processes, for tests.

  with parameter_servers.Job(num_workers=2, num_ps=2) as job:
    outcome = job.run(train, args=(3,))      # train(3), as the chief
    job.kill('ps', 1)
    job.start('ps', 1)

Servers are plain `tf.distribute.Server`s. The chief is a process of its own,
since a process can be connected to one cluster only. All have a deadline.
"""

import json
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests import process_context, processes

DEADLINE_SECONDS = 240.0


class Job:
  """The tasks of one job.

  Args:
    num_workers: workers to start.
    num_ps: parameter servers to start.
    deadline: seconds after which `wait` ends the chief.
    missing: tasks that are not started, as ('worker', 1).
  """

  def __init__(
    self,
    num_workers: int = 2,
    num_ps: int = 2,
    deadline: float = DEADLINE_SECONDS,
    missing: Sequence[tuple[str, int]] = (),
  ):
    found = processes.addresses(num_workers + num_ps + 1)
    self.cluster = {
      'chief': found[:1],
      'worker': found[1 : 1 + num_workers],
      'ps': found[1 + num_workers :],
    }
    self._deadline = deadline
    self._processes = {}
    self._directory = tempfile.TemporaryDirectory()
    self._chiefs = 0
    for job in ('ps', 'worker'):
      for index in range(len(self.cluster[job])):
        if (job, index) not in missing:
          self.start(job, index)

  def __enter__(self) -> 'Job':
    return self

  def __exit__(self, *unused):
    for process in self._processes.values():
      if process.is_alive():
        process.kill()
      process.join(10)
    self._directory.cleanup()

  def tf_config(self, job: str, index: int) -> str:
    """TF_CONFIG of a task."""
    return json.dumps(
      {'cluster': self.cluster, 'task': {'type': job, 'index': index}}
    )

  def start(self, job: str, index: int) -> None:
    """Starts a server, or starts it again after its end."""
    process = process_context.process(_serve, (self.cluster, job, index))
    process.start()
    self._processes[job, index] = process

  def kill(self, job: str, index: int = 0) -> None:
    """kill -9 of a task, and waits until it is gone."""
    process = self._processes[job, index]
    process.kill()
    process.join(10)

  def is_alive(self, job: str, index: int = 0) -> bool:
    """Whether a task still runs."""
    return self._processes[job, index].is_alive()

  def signal(self, job: str, index: int, number: int) -> None:
    """Sends a task a signal."""
    os.kill(self._processes[job, index].pid, number)

  def start_chief(self, function: Callable, args: Sequence[Any] = ()) -> None:
    """Starts the chief, which calls `function(*args)`."""
    self._chiefs += 1
    self._path = os.path.join(self._directory.name, f'chief{self._chiefs}')
    env = {'TF_CONFIG': self.tf_config('chief', 0)}
    process = process_context.process(
      _lead, (function, tuple(args), self._path), env
    )
    process.start()
    self._processes['chief', 0] = process

  def wait(self) -> processes.Outcome:
    """Waits until the chief has ended; ends it at the deadline."""
    process = self._processes['chief', 0]
    process.join(self._deadline)
    if process.is_alive():
      # Its stacks, in the test's log, say where it hangs.
      os.kill(process.pid, signal.SIGABRT)
      process.join(10)
      return processes.Outcome(0, None, ended_at=time.time())
    value = error = None
    text = ''
    if os.path.exists(self._path):
      with open(self._path, 'rb') as f:
        value, error, text = pickle.load(f)
    return processes.Outcome(
      0, process.exitcode, value, error, text, time.time()
    )

  def run(self, function: Callable, args: Sequence[Any] = ()) -> Any:
    """What `function(*args)` returns in the chief; fails if it raises."""
    self.start_chief(function, args)
    outcome = self.wait()
    if outcome.exitcode != 0 or outcome.error_text:
      raise AssertionError(
        f'the chief ended with {outcome.exitcode}\n{outcome.error_text}'
      )
    return outcome.value


def _serve(cluster, job, index):
  os.environ.setdefault('GRPC_FAIL_FAST', 'use_caller')
  import tensorflow as tf

  server = tf.distribute.Server(
    tf.train.ClusterSpec(cluster), job_name=job, task_index=index
  )
  server.join()


def _lead(function, args, path):
  import faulthandler
  import traceback

  faulthandler.enable()
  value = error = None
  text = ''
  try:
    value = function(*args)
  except Exception as e:
    error, text = e, traceback.format_exc()
  try:
    content = pickle.dumps((value, error, text))
  except Exception:  # An error that cannot be pickled.
    content = pickle.dumps((None, None, text))
  with open(path + '.part', 'wb') as f:
    f.write(content)
  os.rename(path + '.part', path)
  # TensorFlow's threads may wait for servers that are gone.
  os._exit(0)
