"""`LocalSteps`: workers that train separately and synchronize equal a simulation."""

import functools
import tempfile

import numpy as np
import tensorflow as tf

from tests import processes, tf_case, tiers
from tests.strategies.multi_worker import local_steps_workers as workers_lib
from tests.strategies.multi_worker.local_steps_workers import Job, largest

_TOLERANCE = 1e-6
_NESTEROV = {'learning_rate': 0.7, 'momentum': 0.9, 'nesterov': True}


def _diloco(inner=None, **changes):
  """Returns a job with Adam and these `inner` options.

  The last batch has one row. An epoch ends between two synchronizations.
  """
  adam = ('Adam', {'learning_rate': 0.01, **(inner or {})})
  options = {'every': 4, 'rows': 121, 'outer': ('SGD', _NESTEROV), **changes}
  return Job(inner=adam, **options)


_SYNCHRONOUS = Job(1, rows=37)  # The last batch has one row.
# The jobs of each start of the workers.
_JOBS = {
  'first': {
    'one_row_left': _SYNCHRONOUS,
    'diloco': _diloco(),
    'normalized': Job(3, rows=121, layers='normalized'),
    'float16': _diloco(policy='mixed_float16'),
    'worker_without_rows': _diloco(has_own_step=True, batch=1, rows=7),
  },
  'more': {
    'three_at_once': _diloco(every=64, options=(('steps_per_execution', 3),)),
    'accumulation': _diloco({'gradient_accumulation_steps': 3}),
    'moving_average': _diloco({'use_ema': True, 'ema_momentum': 0.5}),
    'two_devices': _diloco(devices=2, layers='normalized'),
    'compiled': _diloco(options=(('jit_compile', True),)),
  },
  # TensorFlow's runtime must start first in a process, and keeps its port.
  'collective': {'diloco': _diloco(strategy='multi_worker_collective')},
}
# Jobs for three workers, where the shares of rows are not powers of two.
_OF_THREE = ('one_row_left', 'diloco')


@functools.cache
def _results(count, start):
  jobs = _JOBS[start]
  if count == 3:
    jobs = {name: jobs[name] for name in _OF_THREE}
  return processes.run_workers(
    workers_lib.train, count, args=(jobs,), deadline=200
  )


class LocalStepsTest(tf_case.TestCase):
  def assert_same_bits(self, results, key='weights'):
    """Checks that the results of all workers have the same bits."""
    for other in results[1:]:
      self.assertEqual(largest(results[0][key], other[key]), 0)

  def assert_near(self, a, b):
    """Checks that two lists of weights are equal except for rounding."""
    self.assertLess(largest(a, b), _TOLERANCE)

  @tiers.parameters(2, tiers.soak(3))
  def test_synchronization_in_every_step_equals_synchronous_training(
    self, count
  ):
    found = [result['one_row_left'] for result in _results(count, 'first')]
    self.assert_same_bits(found)
    # On one device, without local steps.
    job = _SYNCHRONOUS
    model = workers_lib.model_of(job, lambda: workers_lib.optimizer(job.inner))
    data = workers_lib.dataset(job)
    history = model.fit(data, epochs=job.epochs, verbose=0).history
    self.assert_near(found[0]['weights'], model.get_weights())
    for result in found:
      for key, values in history.items():
        self.assertAllClose(result['history'][key], values, atol=1e-6)

  @tiers.parameters(
    *[('first', name, 2) for name in list(_JOBS['first'])[1:]],
    tiers.soak('first', 'diloco', 3),
    *[tiers.soak('more', name, 2) for name in _JOBS['more']],
    tiers.soak('collective', 'diloco', 2),
  )
  def test_training_equals_a_simulation(self, start, name, count):
    """Checks that all workers have the same bits and match the simulation."""
    found = [result[name] for result in _results(count, start)]
    self.assert_same_bits(found)
    # The outer state is equal after a synchronization, and `fit` ends with one.
    self.assert_same_bits(found, 'outer')
    self.assert_same_bits(found, 'anchors')
    job = _JOBS[start][name]
    self.assert_near(found[0]['weights'], workers_lib.simulate(job, count))
    evaluations = [result['evaluation'] for result in found]
    if job.policy == 'float32':
      self.assertEqual(evaluations, evaluations[:1] * count)

  def test_only_the_worker_with_an_overflow_skips_a_step(self):
    found = [result['float16'] for result in _results(2, 'first')]
    self.assertGreater(found[0]['iterations'], found[1]['iterations'])

  def test_workers_do_not_communicate_between_synchronizations(self):
    found = [result['diloco'] for result in _results(2, 'first')]
    steps = 11  # In an epoch; the last batch has one row.
    weights, logs, calls = zip(
      *(result['watch'] for result in found), strict=True
    )
    before = calls[0][0]
    for i in range(steps):
      synchronizes = (i + 1) % 4 == 0
      equal = largest(weights[0][i], weights[1][i]) == 0
      self.assertEqual(equal, synchronizes, f'step {i}')
      self.assertNotEqual(logs[0][i], logs[1][i])
      for counts in calls:
        # One all-reduce for the number of rows, and one for the differences.
        self.assertEqual(counts[i] - before, 2 * synchronizes, f'step {i}')
      before = calls[0][i]
    # The epoch's report covers all workers' rows, from each worker's metric
    # sums.
    self.assertEqual(found[0]['history'], found[1]['history'])
    self.assertNotAlmostEqual(
      logs[0][steps - 1]['loss'], found[0]['history']['loss'][0]
    )

  def test_custom_loop_equals_a_simulation(self):
    job = _diloco(rows=120, devices=2)
    found = processes.run_workers(workers_lib.loop, 2, args=(job,))
    self.assert_same_bits(found)
    expected = workers_lib.simulate(job, 2, synchronizes_at_epochs=False)
    self.assert_near(found[0]['weights'], expected)
    new_calls = np.diff(found[0]['calls'])
    steps = np.arange(2, len(new_calls) + 2)
    self.assertAllEqual(new_calls, 2 * (steps % job.every == 0))

  def test_replacing_the_optimizer_synchronizes_workers(self):
    """Checks that workers do not continue from different weights."""
    mine, other = processes.run_workers(
      workers_lib.replace_optimizer, 2, args=(_diloco(),)
    )
    self.assertGreater(largest(mine['apart'], other['apart']), 1e-3)
    for worker in (mine, other):
      for name in ('unsynchronized', 'synchronized'):
        self.assertEqual(largest(mine['synchronized'], worker[name]), 0)

  def test_run_resumes_exactly_between_two_synchronizations(self):
    job = _diloco(layers='dropout', rows=131)
    with tempfile.TemporaryDirectory() as directory:
      found = processes.run_workers(
        workers_lib.save_and_resume, 2, args=(job, directory, 6)
      )
    for result in found:
      # Two steps after a synchronization, each worker has its own weights.
      num_steps, weights = result['saved']
      self.assertEqual((num_steps, result['restored'][0]), (2, 2))
      self.assertEqual(largest(result['restored'][1], weights), 0)
      for a, b in zip(result['whole'][:2], result['resumed'][:2], strict=True):
        self.assertEqual(largest(a, b), 0)
      self.assertEqual(result['whole'][2], result['resumed'][2])
    first, second = (result['restored'][1] for result in found)
    self.assertGreater(largest(first, second), 0)


if __name__ == '__main__':
  tf.test.main()
