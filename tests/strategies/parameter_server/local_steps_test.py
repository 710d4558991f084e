"""LocalSteps on parameter servers: what a simulation of its workers computes."""

import dataclasses
import functools
import os
import pathlib
import tempfile
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import parameter_servers, tiers
from tests.strategies.multi_worker import local_steps_workers as workers_lib
from tests.strategies.multi_worker.local_steps_workers import Job
from tests.strategies.parameter_server import local_steps_programs as programs

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

_TOLERANCE = 1e-6
_NESTEROV = ('SGD', {'learning_rate': 0.7, 'momentum': 0.9, 'nesterov': True})
# The last batch has one row; an epoch ends between two meetings.
_DILOCO = Job(
  4, rows=121, inner=('Adam', {'learning_rate': 0.01}), outer=_NESTEROV
)


def _diloco(inner=None, **changes):
  """The job with other options, `inner` ones of its Adam."""
  adam = ('Adam', {'learning_rate': 0.01, **(inner or {})})
  return dataclasses.replace(_DILOCO, inner=adam, **changes)


_FIRST = {
  'one': (Job(1), 'sync'),
  'diloco': (_DILOCO, 'sync'),
  'normalized': (Job(3, rows=121, layers='normalized'), 'sync'),
  'float16': (_diloco(policy='mixed_float16'), 'sync'),
  'async': (_DILOCO, 'async'),
}
_MORE = {
  'one_row_left': (Job(1, rows=37), 'sync'),
  'longer_than_an_epoch': (_diloco(every=64), 'sync'),
  'own_step': (_diloco(has_own_step=True), 'sync'),
  'worker_without_rows': (_diloco(has_own_step=True, batch=1, rows=7), 'sync'),
  'three_at_once': (_diloco(options=(('steps_per_execution', 3),)), 'sync'),
  'accumulation': (_diloco({'gradient_accumulation_steps': 3}), 'sync'),
  'clipping': (_diloco({'global_clipnorm': 0.05}), 'sync'),
  'moving_average': (_diloco({'use_ema': True, 'ema_momentum': 0.5}), 'sync'),
  'schedule': (
    Job(
      4, rows=121, inner=('SGD', {'learning_rate': 'schedule'}), outer=_NESTEROV
    ),
    'sync',
  ),
  'bounded': (_DILOCO, 'bounded'),
  'partitioned': (_DILOCO, 'sync', 2),
}
_ASYNCHRONOUS = ('async', 'bounded')


def _largest(a, b):
  return max(np.max(np.abs(x - y)) for x, y in zip(a, b, strict=True))


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
    self.assertLess(_largest(a, b), _TOLERANCE)


class TrainTest(_Case):
  def test_a_meeting_in_every_step_is_synchronous_training(self):
    found = _results('first')['one']
    weights, history = workers_lib.one_device(_FIRST['one'][0])
    self.assert_near(found['weights'], weights)
    for key, values in history.items():
      self.assertAllClose(found['history'][key], values, atol=1e-6)

  @tiers.named_parameters(
    *[(n, 'first', n) for n in _FIRST if n not in _ASYNCHRONOUS],
    *[tiers.full(n, 'more', n) for n in _MORE if n not in _ASYNCHRONOUS],
    tiers.full('of_three', 'first', 'diloco', 3),
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
  @pytest.mark.full
  def test_one_worker_equals_a_simulation_in_any_mode(self, kind, name):
    found = _results(kind, 1)[name]
    self.assert_near(found['weights'], workers_lib.simulate(_DILOCO, 1))
    self.assertEqual(found['iterations'], _steps(_DILOCO))

  def test_differences_of_two_are_applied_as_they_come(self):
    found = _results('first')['async']
    steps = _steps(_DILOCO)
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
      _DILOCO, 2, lambda n, value: mutate(value) if n == name else value
    )
    found = _results('first')['diloco']['weights']
    self.assertGreater(_largest(changed, found), 100 * _TOLERANCE)

  def test_reports_are_those_of_meetings(self):
    found = _results('first')['diloco']
    # The first meeting is held when the second unit is complete.
    self.assertEqual(found['logs'][:7], [0.0] * 7)
    self.assertNotIn(0.0, found['logs'][7:])


class ProgramsTest(_Case):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    job = Job(4, rows=96, inner=_DILOCO.inner)
    with parameter_servers.Job(num_workers=2, num_ps=2) as servers:
      cls.refused = servers.run(programs.refuse_all)
      cls.middle = servers.run(programs.use_in_the_middle, (job,))
      cls.wrong = servers.run(programs.train_wrongly, (_DILOCO,))
      cls.loop = servers.run(programs.loop, (_DILOCO,))

  @parameterized.named_parameters((p.__name__, p) for p in programs.REFUSED)
  def test_refused(self, program):
    found = self.refused[program.__name__]
    self.assertRegex(found, programs.REFUSED[program])

  def test_differences_that_count_alike_are_wrong(self):
    # The implementation is changed here, not the simulation.
    expected = workers_lib.simulate(_DILOCO, 2)
    self.assertGreater(_largest(self.wrong, expected), 100 * _TOLERANCE)

  def test_loop_of_the_users_own(self):
    weights, before, after = self.loop
    self.assertEqual((before, after), (20, 22))
    expected = workers_lib.simulate(_DILOCO, 2, meets_at_epochs=False)
    self.assert_near(weights, expected)

  def test_evaluation_in_the_middle_meets(self):
    waiting, waits, before, after = self.middle['middle']
    self.assertEqual((waiting, waits), (2, 0))
    self.assertGreater(_largest(before, after), 1e-3)
    # In each epoch there are 8 batches; each was trained on once.
    self.assertEqual(self.middle['steps'], 16)

  def test_files_have_the_outer_weights(self):
    self.assertEqual(_largest(self.middle['loaded'], self.middle['weights']), 0)

  def test_state_of_workers_is_read_and_written(self):
    self.assertGreater(np.max(np.abs(self.middle['moment'])), 0)
    self.assertAllClose(
      self.middle['assigned'], self.middle['moment'] + 1, atol=1e-6
    )
    self.assertEqual(_largest(*self.middle['after']), 0)


class ResumeTest(_Case):
  def test_goes_on_with_the_bits_of_each_worker(self):
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=2, num_ps=2) as job,
    ):
      found = job.run(programs.interrupt_and_resume, (_DILOCO, directory))
    self.assertNotIn('interrupted', found)
    whole, resumed = found['whole'], found['resumed']
    self.assertEqual(_largest(whole['weights'], resumed['weights']), 0)
    for a, b in zip(whole['state'], resumed['state'], strict=True):
      np.testing.assert_array_equal(a, b)
    # It was saved after the first 4 batches of the second epoch, or before them.
    self.assertEqual(whole['steps'], 22)
    self.assertIn(resumed['steps'], (7, 11))


class KillTest(_Case):
  @tiers.named_parameters(
    ('sgd', Job(8, rows=384, batch=12, epochs=3, outer=_NESTEROV), 'sync'),
    tiers.full(
      'adam',
      Job(8, rows=384, batch=12, epochs=3, inner=('Adam', {})),
      'sync',
    ),
    tiers.full(
      'async',
      Job(8, rows=384, batch=12, epochs=3, inner=('Adam', {})),
      'async',
    ),
  )
  def test_worker_that_dies_in_a_unit(self, trained, mode):
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=2, num_ps=2) as job,
    ):
      progress = os.path.join(directory, 'progress')
      arguments = trained, mode, progress, {}
      job.start_chief(programs.train_while_others_die, arguments)
      # A unit has just begun.
      _wait_for(progress, 40, job)
      job.kill('worker', 1)
      job.start('worker', 1)
      weights, rows, report, logged = job.wait().result()
    logged = ' '.join(logged)
    self.assertIn('worker 1', logged)
    self.assertIn('was lost', logged)
    # Each batch counts once, and each row of the last epoch.
    self.assertEqual(report['steps'], _steps(trained))
    self.assertEqual(rows, trained.rows)
    self.assertEqual(report['lost_states'], 1)
    self.assertIn('was lost with the state of its inner optimizer', logged)
    if trained.inner[0] == 'SGD':
      # It has no state but its steps, which are the others': nothing is lost.
      self.assert_near(weights, workers_lib.simulate(trained, 2))

  @pytest.mark.full
  def test_server_that_dies(self):
    trained = Job(8, rows=384, batch=12, epochs=3, inner=('Adam', {}))
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=2, num_ps=2) as job,
    ):
      progress = os.path.join(directory, 'progress')
      options = {'checkpoint_dir': directory, 'checkpoint_steps': 16}
      arguments = trained, 'sync', progress, options
      job.start_chief(programs.train_while_others_die, arguments)
      _wait_for(progress, 43, job)
      job.kill('ps', 1)
      job.start('ps', 1)
      _, _, report, _ = job.wait().result()
    [recovery] = report['recoveries']
    # Of the units since the checkpoint; workers' states are those of it.
    self.assertIn(recovery['lost_steps'], (8, 16))
    self.assertEqual(
      report['iterations'], _steps(trained) - recovery['lost_steps']
    )


def _wait_for(path, batches, job, seconds=90):
  ends_at = time.monotonic() + seconds
  while time.monotonic() < ends_at:
    if os.path.exists(path) and int(pathlib.Path(path).read_text()) >= batches:
      return
    assert job.is_alive('chief', 0), 'the chief has ended'
    time.sleep(0.01)
  raise AssertionError(f'{batches} batches were not reached')


class BytesTest(_Case):
  def test_bytes_are_those_of_fewer_meetings(self):
    with tempfile.TemporaryDirectory() as directory:
      serve = functools.partial(programs.serve_and_count, directory)
      with parameter_servers.Job(2, 2, serve=serve) as job:
        paths = [os.path.join(directory, str(i)) for i in range(2)]
        found, parameters = job.run(
          programs.bytes_of_epochs, ((0, 4, 16), paths)
        )
    # 32 steps; two workers fetch the parameters and send as much.
    for every, sent in found.items():
      expected = 4 * parameters * (32 // (every or 1))
      self.assertBetween(sent / expected, 0.95, 1.15, f'every={every}')
    self.assertBetween(found[0] / found[16], 13, 17)


if __name__ == '__main__':
  tf.test.main()
