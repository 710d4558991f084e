"""Elastic workers that stop and restart, and checks of their results."""

import os
import random
import tempfile
import time

import numpy as np

from tests import processes, tf_case
from tests.fault_tolerance import elastic_program

COUNT = 3
DEADLINE_SECONDS = 120


class Workers:
  """Three elastic workers that may stop and restart. They log their steps in files.

  Args:
    program: function of a rank, `options`, a directory and `arguments`.
    options: `tfs.ElasticOptions`.
    *arguments: further arguments of `program`.
    deadline: time limit in seconds.
  """

  def __init__(self, program, options, *arguments, deadline=DEADLINE_SECONDS):
    self._directory = tempfile.TemporaryDirectory()
    self.processes = processes.Workers(
      program,
      COUNT,
      args=(options, self._directory.name, *arguments),
      deadline=deadline,
    )

  def path(self, name: str) -> str:
    """Returns the path of a file that the workers wrote."""
    return os.path.join(self._directory.name, name)

  def times(self, rank: int) -> list[float]:
    """Returns the end time of each step of a worker since it started."""
    try:
      with open(self.path(f'steps_{rank}'), encoding='utf-8') as file:
        return [float(line) for line in file.read().split('\n')[:-1]]
    except FileNotFoundError:
      return []

  def steps(self, rank: int) -> int:
    """Returns the number of steps that a worker has done since it started."""
    return len(self.times(rank))

  def wait_until(self, rank: int, steps: int) -> bool:
    """Waits until a worker has done `steps` steps. Returns False if it ends first."""
    while self.steps(rank) < steps:
      if not self.processes.is_alive(rank):
        return False
      time.sleep(0.001)
    return True

  def restart(self, rank: int) -> None:
    """Restarts a killed worker. Its steps count from zero."""
    if self.steps(rank):
      os.remove(self.path(f'steps_{rank}'))
    self.processes.start(rank)

  def kill(self, rank: int, steps: int) -> float:
    """Kills a worker after `steps` steps. Returns the time."""
    assert self.wait_until(rank, steps), f'worker {rank} has ended'
    self.processes.kill(rank)
    return time.time()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.processes.close()
    self._directory.cleanup()


class ElasticCase(tf_case.TestCase):
  """Checks that training results are exact after any fault."""

  def chance(self, part: int) -> random.Random:
    """Returns the random numbers of a part of a test. Prints their seed."""
    seed = int(os.environ.get('TFS_SEED', random.randrange(10**6))) + part
    print(f'TFS_SEED={seed - part}, part {part}')
    return random.Random(seed)

  def assert_results(
    self,
    outcomes,
    epochs=elastic_program.EPOCHS,
    tolerance=2e-6,
    kind='plain',
    batch=elastic_program.BATCH,
  ):
    """Checks that all workers agree bit by bit and equal one device."""
    want, history = elastic_program.uninterrupted(epochs, kind, batch)
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      self.assertIsNotNone(outcome.value, f'worker {outcome.rank}')
      # No step is missing, and no step was applied twice.
      steps = epochs * -(-elastic_program.ROWS // batch)
      self.assertEqual(outcome.value['iterations'], steps)
      self.assertGreater(outcome.value['accuracy'], 0.97)
      pairs = zip(want, outcome.value['weights'], strict=True)
      most = max(np.abs(a - b).max() for a, b in pairs)
      print(f'{kind}, {steps} steps: weights of one device within {most:.1e}')
      self.assertLess(most, tolerance)
      for name, values in (outcome.value['history'] or {}).items():
        # A worker that joined later has only the later epochs, but complete ones.
        since = history[name][-len(values) :]
        self.assertAllClose(since, values, 0, 10 * tolerance, msg=name)
    for outcome in outcomes[1:]:
      for a, b in zip(
        outcomes[0].value['weights'], outcome.value['weights'], strict=True
      ):
        np.testing.assert_array_equal(a, b)
