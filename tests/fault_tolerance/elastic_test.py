"""Elastic training goes on when workers die, come back and come late.

The promise: whatever happens, the weights at the end equal the weights of an
undisturbed run. Real processes, real `kill -9`.
"""

import csv
import itertools
import os
import random
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
# Slow enough that a worker that starts again finds the others still training.
_SECONDS_A_STEP = 0.15


def workers(
  options,
  seconds_a_step=0.02,
  epochs=elastic_program.EPOCHS,
  *arguments,
  program=elastic_program.train,
  **more,
):
  """Returns workers that train; see `elastic_program.train`."""
  return elastic_case.Workers(
    program, options, seconds_a_step, epochs, *arguments, **more
  )


class ElasticTest(elastic_case.ElasticCase):
  @pytest.mark.smoke
  def test_survivors_go_on_without_the_chief(self):
    victim, steps = 0, 7
    options = tfs.ElasticOptions(min_workers=2, window_seconds=1)
    with workers(options) as job:
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
      # Every survivor heard of the death in under a second.
      after = [t - killed for t in outcome.value['ends'] if t > killed - 0.5]
      heard = min(after, default=np.inf)
      print(f'worker {outcome.rank} heard of the death after {heard:.3f} s')
      self.assertLess(heard, 1.0)
      sizes = [g.world_size for g in outcome.value['generations']]
      self.assertEqual(sizes, [3, 2])
      self.assertEqual(outcome.value['workers'], (2, 2))
    # What client libraries read follows the workers that are left.
    places = [outcome.value['place'] for outcome in outcomes]
    self.assertEqual(places, [('worker', 0, True), ('worker', 1, False)])

  @tiers.named_parameters(
    ('survivors', 27, False),
    tiers.soak('as_it_writes', 40, False),
    tiers.soak('and_it_comes_back', 27, True),
  )
  def test_files_of_callbacks_go_on_without_the_chief(self, steps, comes_back):
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    program = elastic_program.train_with_files
    seconds = _SECONDS_A_STEP if comes_back else 0.02
    with workers(options, seconds, program=program) as job:
      job.kill(0, steps)
      if comes_back:
        job.restart(0)
      outcomes = job.processes.wait(range(1 - comes_back, 3))
      self.assert_results(outcomes)
      self.assert_files(job.path('files'), outcomes, 2 + comes_back)

  def assert_files(self, path, outcomes, chiefs):
    """Checks that the files are whole and equal the files of one device."""
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
    # One file of each chief.
    self.assertLen(os.listdir(os.path.join(path, 'train')), chiefs)

  def test_newcomer_hears_of_no_work_that_is_done(self):
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    with workers(options, _SECONDS_A_STEP) as job:
      job.processes.kill(2)
      job.wait_until(0, 5)
      job.restart(2)
      outcomes = job.processes.wait()
    self.assert_results(outcomes)
    # Callbacks heard of each batch and epoch once, or have it from others.
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
    first = outcomes[2].value['generations'][0]
    self.assertGreater(first.number, 1)

  def test_newcomer_with_other_data_leaves_alone(self):
    victim = 1
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    program = elastic_program.train_on_other_data
    with workers(options, _SECONDS_A_STEP, program=program) as job:
      job.kill(victim, 5)
      job.restart(victim)
      outcomes = job.processes.wait()
    newcomer = outcomes.pop(victim)
    self.assertIsInstance(newcomer.error, tfs.errors.CollectiveMismatchError)
    self.assertIn('to be the same on all workers', str(newcomer.error))
    self.assertIn('make_batches', str(newcomer.error))
    self.assert_results(outcomes)
    # A slow newcomer may make the others meet twice.
    sizes = [g.world_size for g in outcomes[0].value['generations']]
    changes = [size for size, _ in itertools.groupby(sizes)]
    self.assertEqual(changes, [3, 2, 3, 2])

  def test_worker_that_does_not_hear_the_end_of_steps(self):
    """The others have done them: it gets the state and leaves them out.

    Their callbacks have changed the learning rate since, as its own then do.
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
  def test_faults_at_random(self, part):
    """Five of a hundred: kills, of two at once too, and stops, at any moment."""
    seed = int(os.environ.get('TFS_SEED', random.randrange(10**6))) + part
    print(f'TFS_SEED={seed - part}, part {part}')
    chance = random.Random(seed)
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
  def test_what_cannot_be_is_refused(self):
    refused = tfs.errors.UnsupportedOptionError
    with self.assertRaisesRegex(
      refused, "file system of this machine.*'gs://job'"
    ):
      tfs.ElasticOptions(directory='gs://job')
    with self.assertRaisesRegex(refused, 'tcp'):
      tfs.elastic.run(lambda job: None, ring=tfs.RingOptions(link='mpi'))


if __name__ == '__main__':
  tf.test.main()
