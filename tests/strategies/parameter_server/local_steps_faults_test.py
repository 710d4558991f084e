"""LocalSteps on parameter servers: deaths, resuming, and bytes on the wire."""

import dataclasses
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
from tests.strategies.multi_worker.local_steps_workers import (
  DILOCO,
  Job,
  diloco,
  largest,
)
from tests.strategies.parameter_server import local_steps_programs as programs
from tests.strategies.parameter_server import wire

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

# 16 batches an epoch, of which 8 are a unit.
_LONG = diloco(every=8, rows=192, batch=12, epochs=2)
_STEPS = 32


class ResumeTest(tf.test.TestCase):
  @pytest.mark.full
  def test_goes_on_with_the_bits_of_each_worker(self):
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=2, num_ps=2) as job,
    ):
      found = job.run(programs.interrupt_and_resume, (DILOCO, directory))
    self.assertNotIn('interrupted', found)
    whole, resumed = found['whole'], found['resumed']
    self.assertEqual(largest(whole['weights'], resumed['weights']), 0)
    for a, b in zip(whole['state'], resumed['state'], strict=True):
      np.testing.assert_array_equal(a, b)
    # It was saved after the first 4 batches of the second epoch, or before them.
    self.assertEqual(whole['steps'], 22)
    self.assertIn(resumed['steps'], (7, 11))


class KillTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    ('sgd', dataclasses.replace(_LONG, inner=Job(8).inner), 'sync'),
    tiers.full('adam', _LONG, 'sync'),
    tiers.soak('async', _LONG, 'async'),
    tiers.full(
      'read', dataclasses.replace(_LONG, inner=Job(8).inner), 'sync', True
    ),
    tiers.full('read_async', _LONG, 'async', True),
  )
  def test_worker_that_dies_in_a_unit(self, trained, mode, reads=False):
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=2, num_ps=2) as job,
    ):
      progress = os.path.join(directory, 'progress')
      arguments = trained, mode, progress, {}, reads
      job.start_chief(programs.train_while_others_die, arguments)
      # A unit has just begun.
      _wait_for(progress, 24 if mode == 'sync' else 16, job)
      killed_at = time.time()
      # Whoever has the unit that reads.
      for victim in (0, 1) if reads and mode == 'async' else (1,):
        job.kill('worker', victim)
        job.start('worker', victim)
      weights, rows, report, logged, began = job.wait().result()
    if mode == 'sync':  # Elsewhere it may be another worker's turn.
      # In the middle of a unit, which failed, or as it began.
      [(worker, begin, end)] = [unit for unit in began if unit[2] is not None]
      self.assertEqual(worker, 1)
      self.assertBetween(killed_at, begin - 0.1, end)
      self.assertEqual(report['lost_states'], 1)
      self.assertRegex(
        ' '.join(logged), 'with the state of its inner optimizer'
      )
    self.assertRegex(
      ' '.join(logged),
      'worker . .*was lost' if reads else 'worker 1 .*was lost',
    )
    # Each batch counts once, and each row of the last epoch.
    self.assertEqual(report['steps'], _STEPS)
    self.assertEqual(rows, trained.rows)
    if trained.inner[0] == 'SGD':
      # It has no state but its steps, which are the others': nothing is lost.
      expected = workers_lib.simulate(trained, 2)
      self.assertLess(largest(weights, expected), 1e-6)

  @tiers.parameters(
    tiers.full('sync', False),
    tiers.soak('sync', True),
    tiers.full('async', True),
    tiers.soak('bounded', True),
  )
  def test_server_that_dies(self, mode, reads):
    """Of the units since the checkpoint nothing is left; of others, everything."""
    trained = dataclasses.replace(_LONG, inner=Job(8).inner)
    with (
      tempfile.TemporaryDirectory() as directory,
      parameter_servers.Job(num_workers=2, num_ps=2) as job,
    ):
      progress = os.path.join(directory, 'progress')
      options = {'checkpoint_dir': directory, 'checkpoint_steps': 16}
      arguments = trained, mode, progress, options, reads
      job.start_chief(programs.train_while_others_die, arguments)
      _wait_for(progress, 26, job)
      job.kill('ps', 1)
      job.start('ps', 1)
      weights, _, report, *_ = job.wait().result()
    [recovery] = report['recoveries']
    lost = recovery['lost_steps']
    self.assertIn(lost, (8, 16))
    self.assertEqual(report['outer_iterations'], (_STEPS - lost) // 8)
    if mode == 'sync':
      self.assertEqual(report['iterations'], _STEPS - lost)
      # What was being read is read again: of the epoch the last batches are left.
      first = _STEPS - lost if reads else 16
      batches = range(first, first + lost)
      expected = workers_lib.simulate(trained, 2, lost=batches)
      self.assertLess(largest(weights, expected), 1e-6)


def _wait_for(path, batches, job, seconds=90):
  ends_at = time.monotonic() + seconds
  while time.monotonic() < ends_at:
    if os.path.exists(path) and int(pathlib.Path(path).read_text()) >= batches:
      return
    assert job.is_alive('chief', 0), 'the chief has ended'
    time.sleep(0.01)
  raise AssertionError(f'{batches} batches were not reached')


@pytest.mark.full
class BytesTest(tf.test.TestCase):
  def test_bytes_are_those_of_fewer_meetings(self):
    with wire.CountedJob(num_workers=2, num_ps=2) as job:
      found, parameters = job.run(
        programs.bytes_of_epochs, ((0, 4, 16), job.counts_address)
      )
    # 32 steps; two workers fetch the parameters and send as much.
    for every, sent in found.items():
      expected = 4 * parameters * (32 // (every or 1))
      self.assertBetween(sent / expected, 0.95, 1.15, f'every={every}')
    self.assertBetween(found[0] / found[16], 13, 17)


if __name__ == '__main__':
  tf.test.main()
