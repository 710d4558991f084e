"""`LocalSteps`: workers train apart and meet exactly as a simulation does."""

import dataclasses
import functools
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
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
# A MultiOptimizer. One of its optimizers keeps averages.
_BY_KIND = {
  'kernels': (
    'Adam',
    {'learning_rate': 0.01, 'use_ema': True, 'ema_momentum': 0.5},
  ),
  'others': ('SGD', {'learning_rate': 0.1}),
}
_SYNCHRONOUS = {'one': Job(1), 'one_row_left': Job(1, rows=37)}
_FIRST = ('normalized', 'float16', 'worker_without_rows')
_JOBS = {'diloco': DILOCO, **{name: JOBS[name] for name in _FIRST}}
_MORE = {
  **{name: job for name, job in JOBS.items() if name not in _FIRST},
  'two_devices': diloco(devices=2, layers='normalized'),
  'compiled': diloco(options=(('jit_compile', True),)),
  'moving_average_of_kernels': dataclasses.replace(
    DILOCO, inner=('by_kind', _BY_KIND)
  ),
}
# TensorFlow's runtime must start first in a process, and keeps its port.
_COLLECTIVE = {'collective': diloco(strategy='multi_worker_collective')}
_LOOPS = {
  'synchronous': Job(0),
  'diloco': diloco(rows=120, devices=2),
}


# Compressed differences of a matrix use fewer bytes. The rounding errors are
# sent later.
_COMPRESSED = {
  compression: Job(3, rows=120, epochs=6, compression=compression)
  for compression in ('none', 'int8')
}


# Jobs for three workers, where the shares of rows are not powers of two.
_OF_THREE = ('one_row_left', 'diloco')


@functools.cache
def _results(count, kind):
  jobs = {
    'first': {'synchronous': Job(0), **_SYNCHRONOUS, **_JOBS},
    'more': _MORE,
    'collective': _COLLECTIVE,
    'loops': _LOOPS,
    'compressed': _COMPRESSED,
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
  @parameterized.parameters(
    *[(name, 2) for name in _SYNCHRONOUS], ('one_row_left', 3)
  )
  def test_a_meeting_in_every_step_is_synchronous_training(self, name, count):
    found = [result[name] for result in _results(count, 'first')]
    self.assert_same_bits(found)
    weights, history = workers_lib.one_device(_SYNCHRONOUS[name])
    self.assert_near(found[0]['weights'], weights)
    for result in found:
      for key, values in history.items():
        self.assertAllClose(result['history'][key], values, atol=1e-6)
    if name == 'one':
      synchronous = _results(count, 'first')[0]['synchronous']
      self.assert_near(found[0]['weights'], synchronous['weights'])

  @parameterized.parameters(*[(name, 2) for name in _JOBS], ('diloco', 3))
  def test_equals_a_simulation(self, name, count):
    self.assert_simulated(name, count, 'first', _JOBS[name])

  @tiers.named_parameters(*[tiers.soak(name, name) for name in _MORE])
  def test_equals_a_simulation_with(self, name):
    self.assert_simulated(name, 2, 'more', _MORE[name])

  @pytest.mark.soak
  def test_differences_are_compressed_as_gradients_are(self):
    results = _results(2, 'compressed')
    exact = results[0]['none']['weights']
    found = [result['int8'] for result in results]
    self.assert_same_bits(found)
    self.assert_same_bits(found, 'anchors')
    # Compression changes the weights a little: an epoch changes them ten times
    # more.
    self.assertBetween(largest(found[0]['weights'], exact), 1e-6, 5e-2)

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

  @parameterized.named_parameters(
    ('one_worker_twice', 'share', lambda s: s + s * (np.arange(len(s)) == 0)),
    ('workers_alike', 'share', lambda s: np.ones_like(s) / len(s)),
    ('anchor_forgotten', 'anchor', lambda pair: (pair[1], pair[0])),
  )
  def test_a_simulation_that_is_wrong_differs(self, name, mutate):
    changed = workers_lib.simulate(
      DILOCO, 2, lambda n, value: mutate(value) if n == name else value
    )
    found = _results(2, 'first')[0]['diloco']['weights']
    self.assertGreater(largest(changed, found), 100 * _TOLERANCE)


class LoopTest(_Case):
  @parameterized.parameters(*_LOOPS)
  def test_equals_a_simulation(self, name):
    found = [result[name] for result in _results(2, 'loops')]
    job = _LOOPS[name]
    self.assert_same_bits(found)
    if job.every:
      expected = workers_lib.simulate(job, 2, meets_at_epochs=False)
    else:
      expected, _ = workers_lib.one_device(job)
    self.assert_near(found[0]['weights'], expected)
    meets = np.diff(found[0]['calls'])
    steps = np.arange(2, len(meets) + 2)
    every = job.every or 1
    self.assertAllEqual(meets, (2 if job.every else 1) * (steps % every == 0))


@pytest.mark.soak
class TrainOnBatchTest(_Case):
  def test_equals_a_simulation(self):
    # The last batch of an epoch has one row.
    found = processes.run_workers(
      workers_lib.train_on_batches, 2, args=(DILOCO,)
    )
    expected = workers_lib.simulate(DILOCO, 2, meets_at_epochs=False)
    for weights, reports in found:
      self.assertEqual(largest(weights, found[0][0]), 0)
      self.assert_near(weights, expected)
      self.assertLen(reports, 22)


class ReplacedTest(_Case):
  def test_steps_are_not_left_behind_with_an_optimizer(self):
    """Replaces the optimizer: without a meeting, workers would continue from
    different weights.
    """
    (first, one), (second, other), (_, met), _ = [
      result
      for meets in (False, True)
      for result in processes.run_workers(
        workers_lib.replace_optimizer, 2, args=(DILOCO, meets)
      )
    ]
    self.assertGreater(largest(first, second), 1e-3)
    self.assertEqual(largest(one, other), 0)
    self.assertEqual(largest(one, met), 0)


class FailureTest(_Case):
  @tiers.named_parameters(
    ('dies', 'dies', tfs.errors.WorkerUnavailableError),
    tiers.soak('stops_alone', 'stops', tfs.errors.Error),
  )
  def test_the_other_gets_an_error_at_a_meeting(self, how, expected):
    with processes.Workers(
      workers_lib.fail, 2, args=(DILOCO, how), deadline=60
    ) as workers:
      error = workers.wait()[0].error
    self.assertIsInstance(error, expected)
    if how == 'dies':
      self.assertEqual(error.rank, 1)


class ResumeTest(_Case):
  @tiers.named_parameters(
    ('dropout', 'dropout'), tiers.soak('normalized', 'normalized')
  )
  def test_goes_on_between_two_meetings(self, layers):
    job = dataclasses.replace(DILOCO, layers=layers, rows=131)
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

  @pytest.mark.soak
  def test_other_workers_go_on_from_the_mean(self):
    with tempfile.TemporaryDirectory() as directory:
      args = (DILOCO, directory, 6)
      saved = processes.run_workers(
        workers_lib.save_and_resume, 2, args=(*args, ('whole',))
      )
      found = processes.run_workers(workers_lib.resume, 3, args=args)
    mine = [result['saved'][1] for result in saved]
    mean = [(a + b) / 2 for a, b in zip(*mine, strict=True)]
    for restored, final in found:
      self.assert_near(restored, mean)
      self.assertEqual(largest(final, found[0][1]), 0)


if __name__ == '__main__':
  tf.test.main()
