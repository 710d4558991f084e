"""One program for every task of a job with parameter servers, and its tasks.

  python -m tests.cluster.task_program <deadline seconds>

Trains with TensorFlow's own strategy, so that nothing but `run_task` is tested.
The last line that it writes is JSON.
"""

import json
import os
import pathlib
import sys
from collections.abc import Mapping

from benchmarks import processes
from tf_strategies import cluster
from tf_strategies.cluster import reachability

DEADLINE_SECONDS = 240.0
STEPS = 6


def train() -> None:
  """Adds to a variable on a parameter server, in steps that workers run."""
  import tensorflow as tf

  # TensorFlow waits for every task that is listed, also for an evaluator.
  jobs = dict(cluster.ClusterConfig.from_env().jobs)
  jobs.pop('evaluator', None)
  strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(
      tf.train.ClusterSpec({job: dict(tasks) for job, tasks in jobs.items()}),
      task_type='chief',
      task_id=0,
      rpc_layer='grpc',
    )
  )
  coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
  with strategy.scope():
    total = tf.Variable(1.0)

  @tf.function
  def step(addend):
    return total.assign_add(addend, use_locking=True)

  results = [
    coordinator.schedule(step, (tf.constant(float(i)),)) for i in range(STEPS)
  ]
  coordinator.join()
  report = {
    'total': float(total.numpy()),
    'device': total.device,
    'results': [float(result.fetch()) for result in results],
    'fail_fast': os.environ['GRPC_FAIL_FAST'],
  }
  print(json.dumps(report), flush=True)


def evaluate() -> None:
  """Says that it was called."""
  print(json.dumps('evaluated'), flush=True)


class Task(processes.Command):
  """A process that runs this program; a context that ends it.

  Args:
    directory: for its output.
    config: which task it is.
    deadline_seconds: that its chief waits.
  """

  def __init__(
    self,
    directory: str,
    config: cluster.ClusterConfig,
    deadline_seconds: float = DEADLINE_SECONDS / 2,
  ):
    self.address = config.address
    name = f'{config.task_type}_{config.task_index}'
    self._out = pathlib.Path(directory, f'{name}.out')
    self._err = pathlib.Path(directory, f'{name}.err')
    super().__init__(
      [
        sys.executable,
        '-m',
        'tests.cluster.task_program',
        str(deadline_seconds),
      ],
      name=name,
      log=self._out,
      error_log=self._err,
      env=_environment(config),
      deadline_seconds=DEADLINE_SECONDS,
    )

  def wait_until_it_serves(self) -> None:
    """Waits until its port accepts connections."""
    self.wait_until(
      lambda: not reachability.unreachable({'task': self.address})
    )

  def last_line(self) -> object:
    """What the last line of its output says."""
    return json.loads(self._out.read_text(encoding='utf-8').splitlines()[-1])

  def stderr(self) -> str:
    """What it has written to stderr so far."""
    return self._err.read_text(encoding='utf-8')


def _environment(config: cluster.ClusterConfig) -> Mapping[str, str]:
  kept = {k: v for k, v in os.environ.items() if k != 'GRPC_FAIL_FAST'}
  return {
    **kept,
    'TF_CONFIG': config.to_tf_config(),
    'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
  }


if __name__ == '__main__':
  cluster.run_task(train, evaluate, deadline_seconds=float(sys.argv[1]))
