"""A parameter server job in real processes, for tests.

  with parameter_servers.Job(num_workers=2, num_ps=2) as job:
    outcome = job.run(train, args=(3,))      # train(3), as the chief
    job.kill('ps', 1)
    job.start('ps', 1)

Servers are plain `tf.distribute.Server`s. The chief has its own process,
because a process can connect to one cluster only. All processes have a deadline.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests import processes

DEADLINE_SECONDS = 240.0


class Job(processes.ProcessGroup):
  """The tasks of one job.

  Args:
    num_workers: number of workers to start.
    num_ps: number of parameter servers to start.
    deadline: seconds after which `wait` ends the chief.
    missing: tasks that are not started, such as ('worker', 1).
    serve: function that servers run, called with the cluster, the job and the index.
  """

  def __init__(
    self,
    num_workers: int = 2,
    num_ps: int = 2,
    deadline: float = DEADLINE_SECONDS,
    missing: Sequence[tuple[str, int]] = (),
    serve: Callable | None = None,
  ):
    super().__init__(deadline)
    self._serve = serve or serve_task
    found = processes.addresses(num_workers + num_ps + 1)
    self.cluster = {
      'chief': found[:1],
      'worker': found[1 : 1 + num_workers],
      'ps': found[1 + num_workers :],
    }
    for job in ('ps', 'worker'):
      for index in range(len(self.cluster[job])):
        if (job, index) not in missing:
          self.start(job, index)

  def tf_config(self, job: str, index: int) -> str:
    """Returns the TF_CONFIG of a task."""
    return processes.tf_config(self.cluster, index, job)

  def start(self, job: str, index: int) -> None:
    """Starts a server, or restarts it after its end."""
    self.start_function((job, index), self._serve, (self.cluster, job, index))

  def restart(self, job: str, index: int) -> None:
    """Kills a server and starts it again."""
    self.kill(job, index)
    self.start(job, index)

  def start_chief(self, function: Callable, args: Sequence[Any] = ()) -> None:
    """Starts the chief, which calls `function(*args)`."""
    self._ends_at = time.monotonic() + self._deadline
    self.start_function(
      ('chief', 0),
      _with_spread_variables,
      (function, args),
      {'TF_CONFIG': self.tf_config('chief', 0)},
      # TensorFlow's threads may wait for servers that are gone.
      exits_at_once=True,
    )

  def wait(self) -> processes.Outcome:
    """Waits for the chief to end. Ends it at the deadline."""
    return self.wait_for([('chief', 0)])[0]

  def run(self, function: Callable, args: Sequence[Any] = ()) -> Any:
    """Returns the result of `function(*args)` in the chief. Raises if it fails."""
    self.start_chief(function, args)
    return self.wait().result()

  def _process(self, key):
    return super()._process(key if len(key) == 2 else (*key, 0))


def _with_spread_variables(function, args):
  """Calls a function. Distributes even small variables over several servers."""
  from tf_strategies.strategies.parameter_server import extended

  extended.SPREAD_BYTES = 1
  return function(*args)


def serve_task(cluster: dict[str, Any], job: str, index: int) -> None:
  """Runs a task's server until the process is ended."""
  os.environ.setdefault('GRPC_FAIL_FAST', 'use_caller')
  import tensorflow as tf

  from tests import virtual_devices

  server = tf.distribute.Server(
    tf.train.ClusterSpec(cluster),
    job_name=job,
    task_index=index,
    config=virtual_devices.server_config(computes=job == 'worker'),
  )
  server.join()
