"""A job ends within its deadline, and nothing of it is left."""

import json
import time

import psutil
import pytest
from absl.testing import absltest

from benchmarks.strategy_costs import catalogue, running
from tf_strategies import errors

# What nobody else passes to a task, to know its processes by.
_SEED = 1_618_033


def spec(**options):
  """Of a short run."""
  return {
    'options': {
      'strategy': 'multi_worker_ring',
      'dataset': 'digits',
      'model': 'mlp',
      'epochs': 1,
      'steps_per_epoch': 2,
      'verbose': False,
      'seed': _SEED,
      **options,
    },
    'num_virtual_devices': 0,
    'untimed_steps': 1,
    'evaluate_every': 0,
  }


def left():
  """Processes of our jobs that still run."""
  found = []
  for process in psutil.process_iter(['cmdline', 'status']):
    words = ' '.join(process.info['cmdline'] or [])
    is_dead = process.info['status'] == psutil.STATUS_ZOMBIE
    if json.dumps({'seed': _SEED})[1:-1] in words and not is_dead:
      found.append(words)
  return found


@pytest.mark.multi_process
class RunningTest(absltest.TestCase):
  def test_deadline_ends_launcher_and_tasks(self):
    job = catalogue.configuration('async_2w1ps')
    began = time.monotonic()
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, 'async_2w1ps did not end within 3 s'
    ):
      running.run(job, spec(), 3.0)
    self.assertEmpty(left())
    self.assertLess(time.monotonic() - began, 60.0)

  @pytest.mark.soak
  def test_failure_says_why(self):
    job = catalogue.Job('failing', 'one_device')
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError,
      'failing ended with status 1: DataError: .*nowhere',
    ):
      running.run(
        job,
        spec(strategy='one_device', dataset='mnist', data_path='/nowhere'),
        120.0,
      )
    self.assertEmpty(left())

  @pytest.mark.soak
  def test_failure_of_a_worker_says_why(self):
    job = catalogue.configuration('ring_2')
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, 'ring_2 ended with status 1: .*nowhere'
    ):
      running.run(job, spec(dataset='mnist', data_path='/nowhere'), 120.0)
    self.assertEmpty(left())

  def test_peak_is_that_of_the_largest_process(self):
    peak = running._Peak(psutil.Process().pid)
    peak.look()
    self.assertGreaterEqual(
      peak.num_bytes, 0.9 * psutil.Process().memory_info().rss
    )


if __name__ == '__main__':
  absltest.main()
