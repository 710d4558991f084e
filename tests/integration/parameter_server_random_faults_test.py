"""Tasks of a parameter server job die, stop and return at random moments.

`TFS_FAULTS` is the number of runs, `TFS_SEED` makes others.
"""

import dataclasses
import os
import random
import signal
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import parameter_servers
from tests.integration import parameter_server_case
from tests.integration import parameter_server_programs as programs

_STEPS = parameter_server_case.STEPS
_CASES = int(os.environ.get('TFS_FAULTS', '10'))
_SEED = os.environ.get('TFS_SEED', '20261121')
_MODES = {
  'async': {'mode': 'async'},
  'sync': {'mode': 'sync'},
  'backup': {'mode': 'sync', 'backup_workers': 1},
  'bounded': {'mode': 'bounded', 'max_staleness': 1},
}


@dataclasses.dataclass
class Fault:
  """What happens to whom, and when."""

  mode: str
  reads: bool  # Whether workers read the data themselves.
  moment: str
  batch: int
  victims: list[tuple[str, int]]
  is_stopped: bool  # Instead of killed.
  seconds: float  # Until it goes on, or is started again.

  @classmethod
  def draw(cls, case: int) -> 'Fault':
    """The fault of a number."""
    rng = random.Random(f'{_SEED} {case}')
    mode = rng.choice(list(_MODES))
    worker, server = ('worker', rng.randrange(2)), ('ps', rng.randrange(2))
    moment = rng.choice(['start', 'evaluation', 'checkpoint', 'anywhere'])
    victims = rng.choice([[worker], [server], [worker, server]])
    return cls(
      mode,
      mode in ('async', 'bounded') and rng.random() < 0.4,
      moment,
      {
        'start': 0,
        'evaluation': rng.choice([1, 1, 2, 10, 30]),
        'checkpoint': 50 * rng.randrange(1, 5),
        'anywhere': rng.randrange(1, _STEPS - 60),
      }[moment],
      victims,
      rng.random() < 0.4,
      rng.choice([0.0, 1.0, 4.0, 7.0]),
    )


class RandomFaultsTest(parameter_server_case.FaultsTestCase):
  """Each run ends by itself, with the steps that it says."""

  @parameterized.parameters(*range(_CASES))
  @pytest.mark.soak
  def test_fault(self, case):
    fault = Fault.draw(case)
    options = {
      **_MODES[fault.mode],
      'checkpoint_dir': self.checkpoints,
      'checkpoint_steps': 50,
      'keepalive_timeout': 2.0,
    }
    arguments = self.arguments(fault.reads, validates=True, **options)
    with parameter_servers.Job(deadline=120) as job:
      began = time.monotonic()
      job.start_chief(programs.train, arguments)
      self._wait_for(job, fault)
      self._strike(job, fault)
      run = self.finish(job)
      seconds = time.monotonic() - began
      message = f'{fault}, {seconds:.0f} s, {run.report["recoveries"]}'
      lost = programs.lost_steps(run)
      self.assertEqual(run.batches, _STEPS, message)
      lost_by_all = lost if fault.mode in ('sync', 'backup') else 0
      self.assertEqual(run.iterations, _STEPS - lost_by_all, message)
      for name in ('loss', 'val_loss'):
        self.assertLen(run.history[name], 3, message)
        self.assertTrue(np.isfinite(run.history[name]).all(), message)
      if not any(job == 'ps' for job, _ in fault.victims):
        self.assertEqual(lost, 0, message)
      if fault.mode == 'sync' and not lost:
        self._compare(job, run, message)
    print(message)

  def _wait_for(self, job, fault):
    """Waits for the moment of a fault."""
    if fault.moment == 'start':
      # It has begun to train, and traces its steps: the first one takes longest.
      deadline = time.monotonic() + 60
      while not self.kept() and time.monotonic() < deadline:
        time.sleep(0.01)
      time.sleep(fault.seconds / 10)
    elif fault.moment == 'evaluation':
      self.wait_for_batch(job, 100)
      self.wait_for_batch(job, fault.batch - 1, '.test')
    else:
      self.wait_for_batch(job, fault.batch)

  def _strike(self, job, fault):
    for victim in fault.victims:
      if fault.is_stopped:
        job.signal(*victim, signal.SIGSTOP)
      else:
        job.kill(*victim)
    time.sleep(fault.seconds)
    for victim in fault.victims:
      if fault.is_stopped:
        job.signal(*victim, signal.SIGCONT)
      else:
        job.start(*victim)

  def _compare(self, job, run, message):
    """With a run that nobody disturbs."""
    undisturbed = job.run(
      programs.train, self.arguments(validates=True, mode='sync')
    )
    for a, b in zip(run.weights, undisturbed.weights, strict=True):
      np.testing.assert_allclose(a, b, 1e-6, 1e-6, err_msg=message)


if __name__ == '__main__':
  tf.test.main()
