"""Elastic workers that come and go, and what every one of their jobs ends with."""

import os
import tempfile
import time

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import processes
from tests.fault_tolerance import elastic_program

COUNT = 3
DEADLINE_SECONDS = 120


class Workers:
  """Three elastic workers that come and go, and tell their steps in files.

  Args:
    program: called with a rank, `options`, a directory and `arguments`.
    options: `tfs.ElasticOptions`.
    *arguments: of the program.
    deadline: in seconds.
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
    """Returns where the workers have left a file."""
    return os.path.join(self._directory.name, name)

  def times(self, rank: int) -> list[float]:
    """Returns when each step of a worker ended, since it began."""
    try:
      with open(self.path(f'steps_{rank}'), encoding='utf-8') as file:
        return [float(line) for line in file.read().split('\n')[:-1]]
    except FileNotFoundError:
      return []

  def steps(self, rank: int) -> int:
    """Returns how many steps a worker has done since it began."""
    return len(self.times(rank))

  def wait_until(self, rank: int, steps: int) -> bool:
    """Waits for so many steps of a worker; False if it ended before."""
    while self.steps(rank) < steps:
      if not self.processes.is_alive(rank):
        return False
      time.sleep(0.001)
    return True

  def restart(self, rank: int) -> None:
    """Starts a killed worker again; its steps count from none."""
    if self.steps(rank):
      os.remove(self.path(f'steps_{rank}'))
    self.processes.start(rank)

  def kill(self, rank: int, steps: int) -> float:
    """Kills a worker after so many steps; returns when."""
    assert self.wait_until(rank, steps), f'worker {rank} has ended'
    self.processes.kill(rank)
    return time.time()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.processes.close()
    self._directory.cleanup()


class ElasticCase(tf.test.TestCase, parameterized.TestCase):
  """Checks of results that must hold after any fault."""

  def assert_results(
    self,
    outcomes,
    epochs=elastic_program.EPOCHS,
    tolerance=2e-6,
    kind='plain',
    batch=elastic_program.BATCH,
  ):
    """Every worker ended as one device does, and all bit by bit alike."""
    want, history = elastic_program.uninterrupted(epochs, kind, batch)
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      self.assertIsNotNone(outcome.value, f'worker {outcome.rank}')
      # Neither a step that is missing nor one that was applied twice.
      steps = epochs * -(-elastic_program.ROWS // batch)
      self.assertEqual(outcome.value['iterations'], steps)
      self.assertGreater(outcome.value['accuracy'], 0.97)
      pairs = zip(want, outcome.value['weights'], strict=True)
      most = max(np.abs(a - b).max() for a, b in pairs)
      print(f'{kind}, {steps} steps: weights of one device within {most:.1e}')
      self.assertLess(most, tolerance)
      for name, values in (outcome.value['history'] or {}).items():
        # One that came later knows the epochs since then: in whole.
        since = history[name][-len(values) :]
        self.assertAllClose(since, values, 0, 10 * tolerance, msg=name)
    for outcome in outcomes[1:]:
      for a, b in zip(
        outcomes[0].value['weights'], outcome.value['weights'], strict=True
      ):
        np.testing.assert_array_equal(a, b)
