"""Elastic training goes on when workers die, come back and come late.

The promise: whatever happens, the weights at the end are those of a run that
nothing happened to. Real processes, real `kill -9`.
"""

import csv
import json
import math
import os
import random
import signal
import sys
import tempfile
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from benchmarks import processes as commands
from tests import processes, tiers
from tests.fault_tolerance import elastic_case, elastic_program
from tf_strategies.monitoring import merge

_DEADLINE_SECONDS = 120
_STEPS = elastic_program.EPOCHS * elastic_program.STEPS
# Slow enough that a worker that starts again finds the others still training.
_SECONDS_A_STEP = 0.15


class Kill:
  """Starts elastic workers and kills one after so many of its steps."""

  def __init__(
    self,
    options,
    seconds_a_step=0.02,
    epochs=elastic_program.EPOCHS,
    deadline=_DEADLINE_SECONDS,
    log_dir=None,
    kind='plain',
    batch=elastic_program.BATCH,
    deaf=(),
    compression='none',
    program=elastic_program.train,
    deaf_every=7,
  ):
    self._directory = tempfile.TemporaryDirectory()
    self.workers = processes.Workers(
      program,
      3,
      args=(
        options,
        self._directory.name,
        seconds_a_step,
        epochs,
        log_dir,
        kind,
        batch,
        deaf,
        compression,
        deaf_every,
      ),
      deadline=deadline,
    )

  def path(self, name: str) -> str:
    """Returns where the workers have left a file."""
    return os.path.join(self._directory.name, name)

  def restart(self, rank: int) -> None:
    """Starts a killed worker again; its steps count from none."""
    path = os.path.join(self._directory.name, f'steps_{rank}')
    if os.path.exists(path):
      os.remove(path)
    self.workers.start(rank)

  def after(self, victim: int, steps: int) -> float:
    """Kills a worker after so many steps; returns when."""
    self.wait_until(victim, steps)
    self.workers.kill(victim)
    return time.time()

  def wait_until(self, victim: int, steps: int) -> None:
    """Returns when a worker has done so many steps, or has ended."""
    path = os.path.join(self._directory.name, f'steps_{victim}')
    while self.workers.is_alive(victim):
      if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
          if len(f.readlines()) >= steps:
            break
      time.sleep(0.001)

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.workers.close()
    self._directory.cleanup()


class ElasticTest(elastic_case.ElasticCase):
  def assert_times(self, outcomes, killed):
    """Survivors heard of the death in under a second; prints the times."""
    heard, resumed = [], []
    for outcome in outcomes:
      generations = outcome.value['generations']
      ended = [g.ended for g in generations if g.ended and g.reason]
      after = [t - killed for t in ended if t > killed - 0.5]
      if after:
        heard.append(min(after))
      first = [g.first_step for g in generations if g.began > killed]
      resumed += [t - killed for t in first if t]
    self.assertNotEmpty(heard)
    self.assertLess(max(heard), 1.0)
    print(
      f'error after {max(heard):.3f} s, next step {min(resumed, default=math.nan):.1f} s'
    )

  def assert_lines(self, log_dir, generations):
    """What the chief measured, of each generation that did steps."""
    steps, numbers = [], []
    for generation in generations:
      again = f'-generation-{generation.number}' * (generation.number > 1)
      path = os.path.join(log_dir, f'run-0{again}.json')
      if os.path.exists(path):
        trace = merge.load(path)
        self.assertEqual(
          trace['otherData']['world_size'], generation.world_size
        )
        spans = trace['traceEvents']
        steps += [e['args']['step'] for e in spans if e.get('cat') == 'step']
        numbers.append(generation.number)
    self.assertEqual(steps, sorted(set(steps)))
    # The one that a death interrupted here may have ended on another worker.
    self.assertGreaterEqual(len(steps), _STEPS - len(generations) + 1)
    self.assertEqual((steps[0], steps[-1]), (1, _STEPS))
    self.assertGreater(numbers[-1], 1)

  def assert_events(self, outcomes, epochs=elastic_program.EPOCHS):
    """Callbacks heard of each batch and epoch once, or have it from others."""
    steps = epochs * elastic_program.STEPS
    for outcome in outcomes:
      self.assertEqual(
        outcome.value['events'],
        {
          'epochs_begun': epochs,
          'epochs_ended': epochs,
          'batches_begun': steps,
          'batches_ended': steps,
        },
        outcome.rank,
      )
      for name, values in outcome.value['history'].items():
        self.assertLen(values, epochs, name)

  @pytest.mark.smoke
  def test_survivors_go_on_without_the_chief(self):
    victim, steps = 0, 7
    options = tfs.ElasticOptions(min_workers=2, window_seconds=1)
    with Kill(options) as kill:
      killed = kill.after(victim, steps)
      survivors = [rank for rank in range(3) if rank != victim]
      outcomes = kill.workers.wait(survivors)
    self.assert_results(outcomes)
    self.assert_times(outcomes, killed)
    for outcome in outcomes:
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
    with Kill(options, _SECONDS_A_STEP, program=program) as kill:
      kill.after(0, steps)
      if comes_back:
        kill.restart(0)
      outcomes = kill.workers.wait(range(1 - comes_back, 3))
      self.assert_results(outcomes)
      self.assert_files(kill.path('files'), outcomes, 2 + comes_back)

  def assert_files(self, path, outcomes, chiefs):
    """The files are whole, and those of a run on one device."""
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
    model = keras.models.load_model(os.path.join(path, 'best.keras'))
    self.assertAllClose(want, model.get_weights(), 0, 2e-6)
    for epoch in range(elastic_program.EPOCHS):
      model.load_weights(os.path.join(path, f'{epoch + 1}.weights.h5'))
      steps = (epoch + 1) * elastic_program.STEPS
      self.assertEqual(int(model.optimizer.iterations.numpy()), steps)
    self.assertAllClose(want, model.get_weights(), 0, 2e-6)
    # One file of each chief.
    self.assertLen(os.listdir(os.path.join(path, 'train')), chiefs)

  @pytest.mark.soak
  def test_restarted_worker_is_let_in(self):
    victim = 1
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    log_dir = self.create_tempdir().full_path
    with Kill(options, _SECONDS_A_STEP, log_dir=log_dir) as kill:
      killed = kill.after(victim, 5)
      kill.workers.start(victim)
      outcomes = kill.workers.wait()
    self.assert_results(outcomes)
    self.assert_events(outcomes)
    self.assert_lines(log_dir, outcomes[0].value['generations'])
    self.assert_times([o for o in outcomes if o.rank != victim], killed)
    self.assertEqual(outcomes[victim].value['generations'][-1].world_size, 3)

  def test_newcomer_hears_of_no_work_that_is_done(self):
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    with Kill(options, _SECONDS_A_STEP) as kill:
      kill.workers.kill(2)
      kill.wait_until(0, 5)
      kill.workers.start(2)
      outcomes = kill.workers.wait()
    self.assert_results(outcomes)
    self.assert_events(outcomes)
    first = outcomes[2].value['generations'][0]
    self.assertGreater(first.number, 1)

  def test_newcomer_with_other_data_leaves_alone(self):
    victim = 1
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    program = elastic_program.train_on_other_data
    with Kill(options, _SECONDS_A_STEP, program=program) as kill:
      kill.after(victim, 5)
      kill.workers.start(victim)
      outcomes = kill.workers.wait()
    newcomer = outcomes.pop(victim)
    self.assertIsInstance(newcomer.error, tfs.errors.CollectiveMismatchError)
    self.assertIn('is not the same on all workers', str(newcomer.error))
    self.assertIn('make_batches', str(newcomer.error))
    self.assert_results(outcomes)
    sizes = [g.world_size for g in outcomes[0].value['generations']]
    self.assertEqual(sizes, [3, 2, 3, 2])

  @pytest.mark.soak
  def test_batch_and_learning_rate_follow_the_workers(self):
    options = tfs.ElasticOptions(
      min_workers=2,
      window_seconds=8,
      batch='per_replica',
      learning_rate='linear',
    )
    with Kill(options) as kill:
      kill.after(1, 30)
      outcomes = kill.workers.wait([0, 2])
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      # On a slow machine two workers may begin before the third has come.
      first = outcome.value['generations'][0]
      self.assertEqual(first.number, 1)
      rate = 0.05 * 2 / first.world_size
      self.assertAllClose(outcome.value['learning_rate'], rate)
      self.assertGreater(outcome.value['accuracy'], 0.97)
      # 20 steps an epoch of 32 rows, then 31 of 21.
      self.assertGreater(outcome.value['iterations'], _STEPS)
    for a, b in zip(*[o.value['weights'] for o in outcomes], strict=True):
      np.testing.assert_array_equal(a, b)

  @pytest.mark.soak
  def test_two_deaths_one_after_the_other(self):
    options = tfs.ElasticOptions(min_workers=1, window_seconds=8)
    with Kill(options) as kill:
      kill.after(0, 10)
      kill.after(1, 30)
      outcomes = kill.workers.wait([2])
    self.assert_results(outcomes)
    sizes = [g.world_size for g in outcomes[0].value['generations']]
    self.assertEqual(sizes[-1], 1)
    self.assertGreaterEqual(len(sizes), 2)

  @tiers.named_parameters(
    tiers.soak('layers_with_state', 'rich'),
    tiers.soak('two_optimizers', 'two_optimizers'),
  )
  def test_step_that_a_death_interrupts_is_done_once(self, kind):
    """With an uneven last batch, validation and callbacks that count epochs."""
    options = tfs.ElasticOptions(min_workers=1, window_seconds=1)
    epochs, batch = 6, 36
    with Kill(options, 0.03, epochs, kind=kind, batch=batch) as kill:
      killed = kill.after(0, 9)
      kill.restart(0)
      kill.wait_until(0, 3)
      kill.after(1, 25)
      outcomes = kill.workers.wait([0, 2])
    self.assert_results(outcomes, epochs, 1e-6, kind, batch)
    self.assert_times(outcomes[1:], killed)
    self.assertNotEmpty(outcomes[0].value['history']['loss'])

  def test_worker_that_does_not_hear_the_end_of_steps(self):
    """The others have done them: it gets the state and leaves them out."""
    with Kill(tfs.ElasticOptions(), epochs=2, deaf=[1]) as kill:
      outcomes = kill.workers.wait()
    self.assert_results(outcomes, epochs=2)
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
    with Kill(options, 0.05, epochs, 290, kind=kind, batch=batch) as kill:
      for _ in range(5):
        time.sleep(chance.uniform(0, 4))
        victims = chance.sample(range(3), chance.choice([1, 1, 1, 2]))
        for victim in victims:
          if not kill.workers.is_alive(victim):
            continue
          if chance.random() < 0.3:
            kill.workers.signal(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 9))
            kill.workers.signal(victim, signal.SIGCONT)
          else:
            kill.workers.kill(victim)
        for victim in victims:
          if not kill.workers.is_alive(victim):
            kill.restart(victim)
      outcomes = kill.workers.wait()
    self.assert_results(outcomes, epochs, 1e-5, kind, batch)


class LauncherTest(elastic_case.ElasticCase):
  """With the launcher, which starts again what ends."""

  def _launch(self, flags, seconds_a_step, seconds_apart=0):
    """The launcher of three workers, and the directory of their notes."""
    directory = self.create_tempdir().full_path
    program = [sys.executable, '-m', 'tests.fault_tolerance.elastic_program']
    how = json.dumps({'seconds_a_step': seconds_a_step})
    job = commands.Command(
      [
        *(sys.executable, '-m', 'tf_strategies.launch', '--num_workers=3'),
        *(*flags, '--', *program, directory, str(seconds_apart), '{}', how),
      ],
      name='launch',
      env=commands.python_environment(),
      deadline_seconds=150,
    )
    self.enter_context(job)
    steps = [os.path.join(directory, f'steps_{rank}') for rank in range(3)]
    job.wait_until(lambda: all(map(os.path.exists, steps)))
    return job, directory

  def _kill(self, directory, rank):
    with open(elastic_program.pid_path(directory, rank)) as file:
      os.kill(int(file.read()), signal.SIGKILL)

  def test_the_others_go_on_without_restarts(self):
    job, directory = self._launch([], 0.05)
    self._kill(directory, 0)
    self.assertEqual(job.wait(), 0, job.output())
    self.assertIn('ended well without worker 0.', job.output())
    self.assert_results(
      [elastic_program.outcome(directory, rank) for rank in (1, 2)]
    )

  @pytest.mark.soak
  def test_all_die_and_come_back_apart_from_each_other(self):
    job, directory = self._launch(['--max_restarts=1'], 0.2, 8)
    for rank in range(3):
      self._kill(directory, rank)
    self.assertEqual(job.wait(), 0, job.output())
    outcomes = [elastic_program.outcome(directory, rank) for rank in range(3)]
    self.assert_results(outcomes)
    # None began alone, none gave up: they have waited for each other.
    sizes = [g.world_size for g in outcomes[0].value['generations']]
    print(sizes)
    self.assertNotIn(1, sizes)
    self.assertEqual(sizes[-1], 3)


class OptionsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    ({'batch': 'local'}, 'batch'),
    ({'learning_rate': 'double'}, 'learning_rate'),
    ({'join': 'now'}, 'join'),
    ({'learning_rate': 'linear'}, "batch='per_replica'"),
    ({'max_failures': -1}, 'max_failures'),
    ({'directory': 3}, 'directory=3.*a path'),
    ({'directory': ''}, "directory=''"),
    ({'directory': 'gs://job'}, "'gs://job'.*file system of this machine"),
    ({'max_worker': 3}, "'max_worker' of ElasticOptions.*'max_workers'"),
  )
  def test_what_cannot_be_is_refused(self, options, message):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      tfs.ElasticOptions(**options)

  def test_mpi_cannot_form_again(self):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, 'tcp'):
      tfs.elastic.run(lambda job: None, ring=tfs.RingOptions(link='mpi'))


if __name__ == '__main__':
  tf.test.main()
