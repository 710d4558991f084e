"""Elastic training continues when workers die, restart and join late.

The weights at the end must always equal the weights of an undisturbed run. The tests
use real processes and `kill -9`.
"""

import csv
import itertools
import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tiers
from tests.fault_tolerance import elastic_case, elastic_program

_STEPS = elastic_program.EPOCHS * elastic_program.STEPS
# Slow enough that a restarted worker joins while the others still train.
_STEP_SECONDS = 0.15


def workers(
  options,
  step_seconds=0.02,
  epochs=elastic_program.EPOCHS,
  *arguments,
  program=elastic_program.train,
  **more,
):
  """Returns workers that train; see `elastic_program.train`."""
  return elastic_case.Workers(
    program, options, step_seconds, epochs, *arguments, **more
  )


class ElasticTest(elastic_case.ElasticCase):
  @pytest.mark.smoke
  def test_survivors_continue_without_the_chief(self):
    victim, steps = 0, 7
    with workers(tfs.ElasticOptions(min_workers=2, window_seconds=1)) as job:
      killed = job.kill(victim, steps)
      survivors = [rank for rank in range(3) if rank != victim]
      outcomes = job.processes.wait(survivors)
      for rank in survivors:
        after = [t for t in job.times(rank) if t > killed]
        gap = max(np.diff([killed, *after]))
        print(f'the next step came after {gap:.1f} s')
        self.assertLess(gap, 15.0)
    self.assert_results(outcomes)
    for outcome in outcomes:
      # Every survivor detected the death within a second.
      after = [t - killed for t in outcome.value['ends'] if t > killed - 0.5]
      delay = min(after, default=np.inf)
      print(f'worker {outcome.rank} detected the death after {delay:.3f} s')
      self.assertLess(delay, 1.0)
      sizes = [g.world_size for g in outcome.value['generations']]
      self.assertEqual(sizes, [3, 2])
      self.assertEqual(outcome.value['workers'], (2, 2))
    # The attributes that client libraries read follow the remaining workers.
    tasks = [outcome.value['task'] for outcome in outcomes]
    self.assertEqual(tasks, [('worker', 0, True), ('worker', 1, False)])

  @tiers.named_parameters(
    ('survivors', 27, False),
    tiers.soak('while_writing', 40, False),
    tiers.soak('with_restart', 27, True),
  )
  def test_callback_files_are_complete_without_the_chief(self, steps, restarts):
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    program = elastic_program.train_with_files
    seconds = _STEP_SECONDS if restarts else 0.02
    with workers(options, seconds, program=program) as job:
      job.kill(0, steps)
      if restarts:
        job.restart(0)
      outcomes = job.processes.wait(range(1 - restarts, 3))
      self.assert_results(outcomes)
      self.assert_files(job.path('files'), outcomes, 2 + restarts)

  def assert_files(self, path, outcomes, chiefs):
    """Checks that the files are complete and equal the files of one device."""
    want, history = elastic_program.uninterrupted()
    with open(os.path.join(path, 'log.csv'), encoding='utf-8') as f:
      rows = list(csv.DictReader(f))
    self.assertEqual(
      [row['epoch'] for row in rows],
      [str(epoch) for epoch in range(elastic_program.EPOCHS)],
    )
    losses = [float(row['loss']) for row in rows]
    self.assertAllClose(history['loss'], losses, 0, 1e-5)
    for outcome in outcomes:
      self.assertEqual(outcome.value['best'], min(losses))
      self.assertAllEqual(outcome.value['losses'], losses)
    model = keras.models.load_model(os.path.join(path, 'best.keras'))
    self.assertAllClose(want, model.get_weights(), 0, 2e-6)
    for epoch in range(elastic_program.EPOCHS):
      model.load_weights(os.path.join(path, f'{epoch + 1}.weights.h5'))
      steps = (epoch + 1) * elastic_program.STEPS
      self.assertEqual(int(model.optimizer.iterations.numpy()), steps)
    self.assertAllClose(want, model.get_weights(), 0, 2e-6)
    # Each chief wrote one file.
    self.assertLen(os.listdir(os.path.join(path, 'train')), chiefs)

  def test_callbacks_of_a_late_worker_see_each_epoch_once(self):
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    with workers(options, _STEP_SECONDS) as job:
      job.processes.kill(2)
      job.wait_until(0, 5)
      job.restart(2)
      outcomes = job.processes.wait()
    self.assert_results(outcomes)
    # Callbacks counted each batch and epoch once, or received the count from others.
    epochs = elastic_program.EPOCHS
    events = {
      'epochs_begun': epochs,
      'epochs_ended': epochs,
      'batches_begun': _STEPS,
      'batches_ended': _STEPS,
    }
    for outcome in outcomes:
      self.assertEqual(outcome.value['events'], events, outcome.rank)
      for name, values in outcome.value['history'].items():
        self.assertLen(values, epochs, name)
    self.assertGreater(outcomes[2].value['generations'][0].number, 1)

  def test_restarted_worker_with_other_data_is_excluded(self):
    victim = 1
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    program = elastic_program.train_on_other_data
    with workers(options, _STEP_SECONDS, program=program) as job:
      job.kill(victim, 5)
      job.restart(victim)
      outcomes = job.processes.wait()
    rejoined = outcomes.pop(victim)
    self.assertIsInstance(rejoined.error, tfs.errors.CollectiveMismatchError)
    self.assertIn('to be the same on all workers', str(rejoined.error))
    self.assertIn('make_batches', str(rejoined.error))
    self.assert_results(outcomes)
    # If it is slow, the others may form a group twice.
    sizes = [g.world_size for g in outcomes[0].value['generations']]
    changes = [size for size, _ in itertools.groupby(sizes)]
    self.assertEqual(changes, [3, 2, 3, 2])

  def test_worker_that_misses_the_end_of_steps_takes_over_the_state(self):
    """Checks that such a worker gets the state and skips the completed steps.

    Its callbacks must then change the learning rate like those of the other workers.
    """
    kind = 'decay'
    with workers(
      tfs.ElasticOptions(), 0.02, 2, kind, elastic_program.BATCH, [1]
    ) as job:
      outcomes = job.processes.wait()
    self.assert_results(outcomes, epochs=2, kind=kind)
    for outcome in outcomes:
      self.assertGreater(len(outcome.value['generations']), 4)

  @parameterized.parameters(*range(20))
  @pytest.mark.soak
  def test_random_faults(self, part):
    """Kills and stops one or two workers at five random times."""
    chance = self.chance(part)
    kind = chance.choice(['plain', 'rich', 'two_optimizers'])
    options = tfs.ElasticOptions(min_workers=1, window_seconds=1)
    epochs, batch = 30, 36
    with workers(options, 0.05, epochs, kind, batch, deadline=290) as job:
      for _ in range(5):
        time.sleep(chance.uniform(0, 4))
        victims = chance.sample(range(3), chance.choice([1, 1, 1, 2]))
        for victim in victims:
          if not job.processes.is_alive(victim):
            continue
          if chance.random() < 0.3:
            job.processes.signal(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 9))
            job.processes.signal(victim, signal.SIGCONT)
          else:
            job.processes.kill(victim)
        for victim in victims:
          if not job.processes.is_alive(victim):
            job.restart(victim)
      outcomes = job.processes.wait()
    self.assert_results(outcomes, epochs, 1e-5, kind, batch)


class OptionsTest(tf.test.TestCase):
  def test_invalid_options_are_refused(self):
    refused = tfs.errors.UnsupportedOptionError
    with self.assertRaisesRegex(
      refused, "file system of this machine.*'gs://job'"
    ):
      tfs.ElasticOptions(directory='gs://job')
    with self.assertRaisesRegex(refused, 'tcp'):
      tfs.elastic.run(lambda job: None, ring=tfs.RingOptions(link='mpi'))


if __name__ == '__main__':
  tf.test.main()
