"""`LocalSteps`: workers train apart and meet exactly as a simulation does."""

import dataclasses
import functools
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import processes, tiers
from tests.strategies.multi_worker import local_steps_workers as workers_lib
from tests.strategies.multi_worker.local_steps_workers import (
  DILOCO,
  JOBS,
  Job,
  diloco,
  largest,
)

_TOLERANCE = 1e-6
_SYNCHRONOUS = Job(1, rows=37)  # The last batch has one row.
_FIRST = ('normalized', 'float16', 'worker_without_rows')
_JOBS = {'diloco': DILOCO, **{name: JOBS[name] for name in _FIRST}}
_MORE = {
  **{name: job for name, job in JOBS.items() if name not in _FIRST},
  'two_devices': diloco(devices=2, layers='normalized'),
  'compiled': diloco(options=(('jit_compile', True),)),
}
# TensorFlow's runtime must start first in a process, and keeps its port.
_COLLECTIVE = {'collective': diloco(strategy='multi_worker_collective')}
_LOOP = diloco(rows=120, devices=2)


# Jobs for three workers, where the shares of rows are not powers of two.
_OF_THREE = ('one_row_left', 'diloco')


@functools.cache
def _results(count, kind):
  jobs = {
    'first': {'one_row_left': _SYNCHRONOUS, **_JOBS},
    'more': _MORE,
    'collective': _COLLECTIVE,
    'loops': {'diloco': _LOOP},
  }[kind]
  if count == 3:
    jobs = {name: jobs[name] for name in _OF_THREE}
  work = workers_lib.loop if kind == 'loops' else workers_lib.train
  return processes.run_workers(work, count, args=(jobs,), deadline=200)


class _Case(tf.test.TestCase, parameterized.TestCase):
  def assert_same_bits(self, results, key='weights'):
    """Checks that the results of all workers have the same bits."""
    for other in results[1:]:
      for a, b in zip(results[0][key], other[key], strict=True):
        np.testing.assert_array_equal(a, b)

  def assert_near(self, a, b):
    """Checks that two lists of weights are equal except for rounding."""
    self.assertLess(largest(a, b), _TOLERANCE)


class TrainTest(_Case):
  @tiers.parameters(2, tiers.soak(3))
  def test_a_meeting_in_every_step_is_synchronous_training(self, count):
    found = [result['one_row_left'] for result in _results(count, 'first')]
    self.assert_same_bits(found)
    weights, history = workers_lib.one_device(_SYNCHRONOUS)
    self.assert_near(found[0]['weights'], weights)
    for result in found:
      for key, values in history.items():
        self.assertAllClose(result['history'][key], values, atol=1e-6)

  @tiers.parameters(*[(name, 2) for name in _JOBS], tiers.soak('diloco', 3))
  def test_equals_a_simulation(self, name, count):
    self.assert_simulated(name, count, 'first', _JOBS[name])

  @tiers.named_parameters(*[tiers.soak(name, name) for name in _MORE])
  def test_equals_a_simulation_with(self, name):
    self.assert_simulated(name, 2, 'more', _MORE[name])

  @pytest.mark.soak
  def test_equals_a_simulation_by_collectives_of_tensorflow(self):
    [job] = _COLLECTIVE.values()
    self.assert_simulated('collective', 2, 'collective', job)

  def assert_simulated(self, name, count, kind, job):
    """Checks that all workers have the same bits and match the simulation."""
    found = [result[name] for result in _results(count, kind)]
    self.assert_same_bits(found)
    # These are equal after meetings, and `fit` ends with one.
    self.assert_same_bits(found, 'outer')
    self.assert_same_bits(found, 'anchors')
    self.assert_near(found[0]['weights'], workers_lib.simulate(job, count))
    evaluations = [result['evaluation'] for result in found]
    if job.policy == 'float32':
      self.assertEqual(evaluations, evaluations[:1] * count)

  def test_one_worker_skips_what_overflows(self):
    found = [result['float16'] for result in _results(2, 'first')]
    self.assertGreater(found[0]['iterations'], found[1]['iterations'])

  def test_nothing_crosses_workers_between_meetings(self):
    found = [result['diloco'] for result in _results(2, 'first')]
    steps = 11  # In an epoch; the last batch has one row.
    weights, logs, calls = zip(
      *(result['watch'] for result in found), strict=True
    )
    before = calls[0][0]
    for i in range(steps):
      meets = (i + 1) % 4 == 0
      equal = largest(weights[0][i], weights[1][i]) == 0
      self.assertEqual(equal, meets, f'step {i}')
      self.assertNotEqual(logs[0][i], logs[1][i])
      for told in calls:
        # One all-reduce for the number of rows, and one for the differences.
        self.assertEqual(told[i] - before, 2 * meets, f'step {i}')
      before = calls[0][i]
    # The epoch's report covers all workers' rows, from each worker's metric
    # sums.
    self.assertEqual(found[0]['history'], found[1]['history'])
    self.assertNotAlmostEqual(
      logs[0][steps - 1]['loss'], found[0]['history']['loss'][0]
    )

  def test_a_simulation_that_is_wrong_differs(self):
    changed = workers_lib.simulate(DILOCO, 2, lambda s: np.ones_like(s) / 2)
    found = _results(2, 'first')[0]['diloco']['weights']
    self.assertGreater(largest(changed, found), 100 * _TOLERANCE)


class LoopTest(_Case):
  def test_equals_a_simulation(self):
    found = [result['diloco'] for result in _results(2, 'loops')]
    self.assert_same_bits(found)
    expected = workers_lib.simulate(_LOOP, 2, meets_at_epochs=False)
    self.assert_near(found[0]['weights'], expected)
    meets = np.diff(found[0]['calls'])
    steps = np.arange(2, len(meets) + 2)
    self.assertAllEqual(meets, 2 * (steps % _LOOP.every == 0))


class ReplacedTest(_Case):
  def test_steps_are_not_left_behind_with_an_optimizer(self):
    """Replaces the optimizer: without a meeting, workers would continue from
    different weights.
    """
    mine, other = processes.run_workers(
      workers_lib.replace_optimizer, 2, args=(DILOCO,)
    )
    self.assertGreater(largest(mine['apart'], other['apart']), 1e-3)
    for name in ('without_a_meeting', 'after_a_meeting'):
      self.assertEqual(largest(mine['after_a_meeting'], other[name]), 0)
    self.assertEqual(
      largest(mine['after_a_meeting'], mine['without_a_meeting']), 0
    )


class ResumeTest(_Case):
  def test_goes_on_between_two_meetings(self):
    job = dataclasses.replace(DILOCO, layers='dropout', rows=131)
    with tempfile.TemporaryDirectory() as directory:
      found = processes.run_workers(
        workers_lib.save_and_resume, 2, args=(job, directory, 6)
      )
    for result in found:
      # The 6th step was the 2nd since a meeting. Each worker has its own
      # weights.
      self.assertEqual(result['since_meeting'], 2)
      since_meeting, weights = result['saved']
      self.assertEqual(since_meeting, 2)
      self.assertEqual(largest(result['restored'], weights), 0)
      for a, b in zip(result['whole'][:2], result['resumed'][:2], strict=True):
        self.assertEqual(largest(a, b), 0)
      self.assertEqual(result['whole'][2], result['resumed'][2])
    self.assertGreater(largest(found[0]['restored'], found[1]['restored']), 0)


if __name__ == '__main__':
  tf.test.main()
