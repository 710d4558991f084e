"""Tasks of a parameter server job are killed or stopped during `fit`.

Each row of a table defines a training run, the faults of its tasks with their
times, and the expected end. `TFS_SEED` changes the random faults. `TFS_FAULTS`
is their number.
"""

import os
import random
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import parameter_servers, processes, tiers
from tests.integration import parameter_server_case
from tests.integration import parameter_server_programs as programs
from tf_strategies import errors

_STEPS = parameter_server_case.STEPS
_SEED = os.environ.get('TFS_SEED', '20261121')
_FAULTS = int(os.environ.get('TFS_FAULTS', '10'))
_MODES = {
  'async': {'mode': 'async'},
  'sync': {'mode': 'sync'},
  'backup': {'mode': 'sync', 'backup_workers': 1},
  'bounded': {'mode': 'bounded', 'max_staleness': 1},
}
_WORKER = 'worker', 1


_DIES = ('at', 130), ('restart', *_WORKER)
# Faults of workers. The random faults also include them.
_WORKERS = (
  tiers.soak('dies_sync_reads', {'mode': 'sync', 'worker_input': True}, _DIES),
  tiers.smoke(
    'dies_async_reads', {'mode': 'async', 'worker_input': True}, _DIES
  ),
  tiers.soak(
    'stops', {'keepalive_timeout': 3.0}, (('at', 20), ('stop', *_WORKER))
  ),
)


def _restarts(server):
  return ('kill', 'ps', server), ('wait', 1.0), ('start', 'ps', server)


_SERVERS = (
  # Options, faults, and the minimum and maximum number of lost steps.
  tiers.smoke('dies', {}, (('at', 130), *_restarts(0)), (1, 2 * 60)),
  tiers.soak(
    'in_a_group_of_steps',
    {'at_once': 20},
    (('at', 5), *_restarts(1)),
    (0, 2 * 60),
  ),
  # The run continues from its initial state.
  tiers.soak(
    'before_a_checkpoint_is_due',
    {'saves': 1000},
    (('at', 10), *_restarts(1)),
    (7, 60),
  ),
  # The server counts as dead, although it still has its variables.
  tiers.soak(
    'stops_and_continues',
    {'keepalive_timeout': 2.0},
    (('at', 130), ('stop', 'ps', 1), ('wait', 6.0), ('continue', 'ps', 1)),
    (1, 2 * 60),
  ),
)


_IMPATIENT = {'keepalive_timeout': 2.0, 'recovery_timeout': 5.0}
_ERRORS = (
  # Options, faults, the error, and the names that it must or must not contain.
  (
    'without_checkpoints',
    {},
    (('at', 20), ('kill', 'ps', 1)),
    errors.ParameterServerUnavailableError,
    'ps 1',
    'ps 0',
  ),
  (
    'stopped_server',
    {'step_timeout': 8.0},
    (('at', 20), ('stop', 'ps', 1)),
    errors.WorkerUnavailableError,
    'no answer from: ps 1 at',
    'ps 0|worker',
  ),
  (
    'killed_worker_and_stopped_server',
    _IMPATIENT,
    (('at', 20), ('kill', 'worker', 0), ('stop', 'ps', 0)),
    errors.ParameterServerUnavailableError,
    'ps 0',
    'ps 1',
  ),
  (
    'stops_in_an_evaluation',
    {**_IMPATIENT, 'validates': True, 'saves': 60},
    (('at', 100), ('at', 1, '.test'), ('stop', 'ps', 0)),
    errors.RendezvousError,
    'ps 0',
    'ps 1',
  ),
)


class ParameterServerFaultsTest(parameter_server_case.FaultsTestCase):
  """Training ends by itself with the right number of steps."""

  def steps_of(self, options):
    """Returns the number of steps. Two workers may share each batch."""
    is_halved = options.get('worker_input') and options.get('mode') == 'sync'
    return _STEPS // 2 if is_halved else _STEPS

  @tiers.named_parameters(*_WORKERS)
  def test_worker_fault_loses_no_step(self, options, faults):
    """Checks that each step ran once, and each row of the last epoch counted once."""
    run = self.run_with_faults(faults, self.arguments(**options))
    steps = self.steps_of(options)
    self.assertEqual(run.batches, steps)
    self.assertEqual(run.iterations, steps)
    self.assertEqual(run.rows_counted, programs.ROWS)
    logged = [text for _, text in run.logged]
    self.assertIn('worker 1', ' '.join(logged))
    if 'keepalive_timeout' in options:
      self.assert_disconnected(logged, 'worker 1')
    if faults is _DIES and steps < _STEPS:
      # Another worker reads its batch instead.
      with parameter_servers.Job() as job:
        whole = job.run(programs.train, self.arguments(**options))
      self.assert_same_bits(run, whole)

  @tiers.named_parameters(*_SERVERS)
  def test_server_fault_loses_only_steps_since_the_checkpoint(
    self, options, faults, lost_from_to
  ):
    """Checks the lost steps, which all servers have lost."""
    run = self.run_with_faults(
      faults, self.arguments(**{'saves': 60, **options})
    )
    steps, lost = self.steps_of(options), programs.lost_steps(run)
    self.assertBetween(lost, *lost_from_to)
    self.assertEqual(run.batches, steps // options.get('at_once', 1))
    self.assertEqual(run.iterations, steps - lost)
    for values in run.history.values():
      self.assertLen(values, parameter_server_case.EPOCHS)
      self.assertTrue(np.isfinite(values).all())
    if 'keepalive_timeout' in options:
      self.assert_disconnected([text for _, text in run.logged], 'ps 1')
      return
    [recovery] = run.report['recoveries']
    task = f'ps {recovery["server"]}'
    named = [t for t, text in run.logged if task in text]
    self.assertLess(named[0] - self.killed_at, 10)

  @tiers.named_parameters(
    *tiers.few(_ERRORS, 'killed_worker_and_stopped_server')
  )
  def test_unrecoverable_fault_raises_a_typed_error(
    self, options, faults, error, names, unexpected
  ):
    """Checks that a server that does not answer or return is named at a deadline."""
    with parameter_servers.Job(deadline=90) as job:
      job.start_chief(programs.train, self.arguments(**options))
      self.inject_faults(job, faults)
      outcome = job.wait()
    self.assertIsNotNone(outcome.error, 'The chief hangs or succeeded.')
    self.assertIsInstance(outcome.error, error, outcome.error_text)
    message = str(outcome.error)
    self.assertIn(names, message)
    [server] = [f[2] for f in faults if f[1] == 'ps']
    self.assertIn(job.cluster['ps'][server], message)
    self.assertNotRegex(message, unexpected)

  def assert_same_bits(self, run, whole):
    """Checks that two runs gave the same weights."""
    for a, b in zip(run.weights, whole.weights, strict=True):
      np.testing.assert_array_equal(a, b)

  def assert_disconnected(self, logged, task):
    """Checks that the log reports only this task as given up."""
    found = [text for text in logged if 'given up' in text]
    self.assertLen(found, 1)
    self.assertStartsWith(found[0], f'{task} at ')

  @parameterized.parameters(
    ('sync', False, _STEPS, 120),
    ('sync', True, _STEPS // 2, 60),
    ('async', True, _STEPS, 120),
  )
  @pytest.mark.soak
  def test_restarted_coordinator_resumes_exactly(
    self, mode, reads, steps, saved
  ):
    """Checks that a resumed run ends as an uninterrupted one."""
    with parameter_servers.Job() as job:
      arguments = self.arguments(reads, saves=60, mode=mode)
      job.start_chief(programs.train, arguments)
      self.inject_faults(job, (('at', saved + 30), ('kill', 'chief', 0)))
      job.start_chief(programs.train, arguments)
      resumed = self.finish(job)
      # Callbacks do not see the batches that were trained before.
      self.assertEqual(resumed.report['steps'], steps - saved)
      self.assertEqual(resumed.batches, steps - saved)
      self.assertEqual(resumed.iterations, steps)
      self.assertEqual(resumed.rows_counted, programs.ROWS)
      if mode == 'sync':
        whole = job.run(programs.train, self.arguments(reads, mode=mode))
        self.assert_same_bits(resumed, whole)

  @pytest.mark.soak
  def test_coordinator_with_another_number_of_workers_raises(self):
    """Checks that data is not split differently, which would repeat elements."""
    arguments = self.arguments(True, saves=60)
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, arguments)
      self.inject_faults(job, (('at', 170), ('kill', 'chief', 0)))
    with parameter_servers.Job(num_workers=3) as job:
      job.start_chief(programs.train, arguments)
      outcome = job.wait()
    self.assertIsInstance(
      outcome.error, errors.UnsupportedOptionError, outcome.error_text
    )
    self.assertIn('start 2 workers', str(outcome.error))

  @pytest.mark.smoke
  def test_newer_coordinator_takes_over_the_servers(self):
    """Checks that the old chief raises and names the new one, which continues."""
    with parameter_servers.Job(num_ps=1) as job:
      options = {'mode': 'sync', 'checkpoint_dir': self.checkpoints}
      job.start_chief(programs.train, (self.progress, 1000, False, options))
      self.wait_for_batch(job, 20)
      cluster = {**job.cluster, 'chief': processes.addresses(1)}
      arguments = self.progress + '.new', 1, False, options
      job.start_function(
        ('chief', 1),
        programs.train,
        arguments,
        {'TF_CONFIG': processes.tf_config(cluster, 0, 'chief')},
        exits_at_once=True,
      )
      older, newer = job.wait_for([('chief', 0), ('chief', 1)])
    self.assertIsInstance(older.error, errors.TakenOverError, older.error_text)
    self.assertRegex(
      str(older.error), 'got run .* .process [0-9]+ on .*taken over .*Fix'
    )
    self.assertEqual(newer.result().iterations, programs.STEPS_PER_EPOCH)
    self.assertLess(older.ended_at, newer.result().step_ended[0])

  def test_coordinator_with_port_in_use_raises(self):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      message = job.run(programs.start_with_port_in_use)
    address = job.cluster['chief'][0]
    self.assertRegex(message, f'for chief 0, got {address}.*Fix: end')


class RandomFaultsTest(parameter_server_case.FaultsTestCase):
  """Tasks die, stop and return at random moments. Each run reports its end."""

  @parameterized.parameters(*range(_FAULTS))
  @pytest.mark.soak
  def test_random_fault(self, case):
    rng = random.Random(f'{_SEED} {case}')
    mode = rng.choice(list(_MODES))
    worker, server = ('worker', rng.randrange(2)), ('ps', rng.randrange(2))
    victims = rng.choice([[worker], [server], [worker, server]])
    fault, undo = rng.choice([('kill', 'start'), ('stop', 'continue')])
    seconds = rng.choice([0.0, 1.0, 4.0, 7.0])
    moment = rng.choice(
      [
        # Tracing makes the first step the longest.
        [('wait', seconds / 10)],
        [('at', 100), ('at', rng.choice([0, 0, 1, 9, 29]), '.test')],
        [('at', 50 * rng.randrange(1, 5))],  # A checkpoint is due.
        [('at', rng.randrange(1, _STEPS - 60))],
      ]
    )
    faults = [
      *moment,
      *[(fault, *victim) for victim in victims],
      ('wait', seconds),
      *[(undo, *victim) for victim in victims],
    ]
    reads = mode in ('async', 'bounded') and rng.random() < 0.4
    with parameter_servers.Job(deadline=120) as job:
      options = {**_MODES[mode], 'saves': 50, 'keepalive_timeout': 2.0}
      arguments = self.arguments(reads, validates=True, **options)
      job.start_chief(programs.train, arguments)
      deadline = time.monotonic() + 60
      while not os.path.isdir(self.checkpoints) or not self.kept():
        self.assertLess(time.monotonic(), deadline)
        time.sleep(0.01)
      self.inject_faults(job, faults)
      run = self.finish(job)
      message = f'{mode}, reads {reads}, {faults}, {run.report["recoveries"]}'
      print(message)
      lost = programs.lost_steps(run)
      self.assertEqual(run.batches, _STEPS, message)
      self.assertEqual(run.iterations, _STEPS - lost, message)
      for name in ('loss', 'val_loss'):
        self.assertLen(run.history[name], 3, message)
        self.assertTrue(np.isfinite(run.history[name]).all(), message)
      if server not in victims:
        self.assertEqual(lost, 0, message)
      if mode == 'sync' and not lost:
        whole = job.run(
          programs.train, self.arguments(validates=True, mode='sync')
        )
        for a, b in zip(run.weights, whole.weights, strict=True):
          np.testing.assert_allclose(a, b, 1e-6, 1e-6, err_msg=message)


if __name__ == '__main__':
  tf.test.main()
