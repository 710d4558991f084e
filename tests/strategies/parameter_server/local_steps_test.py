"""LocalSteps on parameter servers: what a simulation of its workers computes."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import parameter_servers, tiers
from tests.strategies.multi_worker import local_steps_workers as workers_lib
from tests.strategies.multi_worker.local_steps_workers import (
  DILOCO,
  JOBS,
  Job,
  diloco,
  largest,
)
from tests.strategies.parameter_server import local_steps_programs as programs

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

_TOLERANCE = 1e-6
_FIRST = {
  'one': (Job(1), 'sync'),
  'diloco': (DILOCO, 'sync'),
  'normalized': (JOBS['normalized'], 'sync'),
  'float16': (JOBS['float16'], 'sync'),
  'async': (DILOCO, 'async'),
  'read': (DILOCO, 'sync', 1, True),
  'read_async': (DILOCO, 'async', 1, True),
}
_MORE = {
  'one_row_left': (Job(1, rows=37), 'sync'),
  **{name: (job, 'sync') for name, job in JOBS.items() if name not in _FIRST},
  'bounded': (DILOCO, 'bounded'),
  'partitioned': (DILOCO, 'sync', 2),
  'read_of_known_number': (diloco(rows=120, every=3), 'sync', 1, True),
}
_ASYNCHRONOUS = ('async', 'bounded', 'read_async')


def _steps(job):
  return job.epochs * -(-job.rows // job.batch)


@functools.cache
def _results(kind, num_workers=2):
  jobs = {'first': _FIRST, 'more': _MORE}[kind]
  if num_workers == 1:
    jobs = {name: jobs[name] for name in jobs if name in _ASYNCHRONOUS}
  if num_workers == 3:
    jobs = {'diloco': jobs['diloco']}
  with parameter_servers.Job(num_workers, num_ps=2) as job:
    return job.run(programs.train_all, (jobs,))


class _Case(tf.test.TestCase, parameterized.TestCase):
  def assert_near(self, a, b):
    """Two lists of weights are equal but for rounding."""
    self.assertLess(largest(a, b), _TOLERANCE)


@pytest.mark.full
class TrainTest(_Case):
  def test_a_meeting_in_every_step_is_synchronous_training(self):
    found = _results('first')['one']
    weights, history = workers_lib.one_device(_FIRST['one'][0])
    self.assert_near(found['weights'], weights)
    for key, values in history.items():
      self.assertAllClose(found['history'][key], values, atol=1e-6)

  @tiers.named_parameters(
    *[(n, 'first', n) for n in _FIRST if n not in _ASYNCHRONOUS],
    *[tiers.soak(n, 'more', n) for n in _MORE if n not in _ASYNCHRONOUS],
    tiers.soak('of_three', 'first', 'diloco', 3),
  )
  def test_equals_a_simulation(self, kind, name, num_workers=2):
    found = _results(kind, num_workers)[name]
    job = {**_FIRST, **_MORE}[name][0]
    self.assert_near(found['weights'], workers_lib.simulate(job, num_workers))
    self.assertEqual(found['report']['steps'], _steps(job))
    self.assertEqual(found['report']['lost_states'], 0)

  @parameterized.parameters(
    *[
      (kind, name)
      for kind, jobs in (('first', _FIRST), ('more', _MORE))
      for name in jobs
      if name in _ASYNCHRONOUS
    ]
  )
  def test_one_worker_equals_a_simulation_in_any_mode(self, kind, name):
    found = _results(kind, 1)[name]
    self.assert_near(found['weights'], workers_lib.simulate(DILOCO, 1))
    self.assertEqual(found['iterations'], _steps(DILOCO))

  def test_differences_of_two_are_applied_as_they_come(self):
    found = _results('first')['async']
    steps = _steps(DILOCO)
    self.assertEqual(found['report']['steps'], steps)
    self.assertEqual(sum(found['report']['staleness'].values()), steps)
    # Half of the steps are each worker's, if they have equally many.
    self.assertLess(found['iterations'], steps)
    self.assertLess(found['history']['loss'][1], found['history']['loss'][0])

  @parameterized.named_parameters(
    ('one_worker_twice', 'share', lambda s: s + s * (np.arange(len(s)) == 0)),
    ('workers_alike', 'share', lambda s: np.ones_like(s) / len(s)),
    ('anchor_forgotten', 'anchor', lambda pair: (pair[1], pair[0])),
  )
  def test_a_simulation_that_is_wrong_differs(self, name, mutate):
    changed = workers_lib.simulate(
      DILOCO, 2, lambda n, value: mutate(value) if n == name else value
    )
    found = _results('first')['diloco']['weights']
    self.assertGreater(largest(changed, found), 100 * _TOLERANCE)

  def test_reports_are_those_of_meetings(self):
    found = _results('first')['diloco']
    # The first meeting is held when the second unit is complete.
    self.assertEqual(found['logs'][:7], [0.0] * 7)
    self.assertNotIn(0.0, found['logs'][7:])


class ProgramsTest(_Case):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    job = Job(4, rows=96, inner=DILOCO.inner)
    with parameter_servers.Job(num_workers=2, num_ps=2) as servers:
      cls.refused = servers.run(programs.refuse_all)
      cls.middle = servers.run(programs.use_in_the_middle, (job,))
      cls.wrong = servers.run(programs.train_wrongly, (DILOCO,))
      cls.loop = servers.run(programs.loop, (DILOCO,))

  @parameterized.named_parameters((p.__name__, p) for p in programs.REFUSED)
  def test_refused(self, program):
    found = self.refused[program.__name__]
    self.assertRegex(found, programs.REFUSED[program])

  def test_differences_that_count_alike_are_wrong(self):
    # The implementation is changed here, not the simulation.
    expected = workers_lib.simulate(DILOCO, 2)
    self.assertGreater(largest(self.wrong, expected), 100 * _TOLERANCE)

  def test_loop_of_the_users_own(self):
    weights, before, after = self.loop
    self.assertEqual((before, after), (20, 22))
    expected = workers_lib.simulate(DILOCO, 2, meets_at_epochs=False)
    self.assert_near(weights, expected)

  def test_evaluation_in_the_middle_meets(self):
    waiting, waits, before, after = self.middle['middle']
    self.assertEqual((waiting, waits), (2, 0))
    self.assertGreater(largest(before, after), 1e-3)
    # In each epoch there are 8 batches; each was trained on once.
    self.assertEqual(self.middle['steps'], 16)

  def test_files_have_the_outer_weights(self):
    self.assertEqual(largest(self.middle['loaded'], self.middle['weights']), 0)

  def test_state_of_workers_is_read_and_written(self):
    self.assertGreater(np.max(np.abs(self.middle['moment'])), 0)
    self.assertAllClose(
      self.middle['assigned'], self.middle['moment'] + 1, atol=1e-6
    )
    self.assertEqual(largest(*self.middle['after']), 0)


if __name__ == '__main__':
  tf.test.main()
