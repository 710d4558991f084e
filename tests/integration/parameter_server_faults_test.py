"""kill -9 of a worker, a parameter server and the coordinator during `fit`."""

import os
import random
import signal
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


class ParameterServerFaultsTest(parameter_server_case.FaultsTestCase):
  """Training ends by itself, with the right number of steps."""

  @pytest.mark.soak
  def test_worker(self):
    self.assert_worker('sync', reads=False)

  @pytest.mark.soak
  def test_worker_that_reads_its_batch_of_synchronous_steps(self):
    """Another one reads it instead: all is as if nobody had died, bit by bit."""
    run = self.assert_worker('sync', reads=True)
    with parameter_servers.Job() as job:
      whole = job.run(programs.train, self.arguments(True, mode='sync'))
    for a, b in zip(run.weights, whole.weights, strict=True):
      np.testing.assert_array_equal(a, b)

  @parameterized.parameters(False, True)
  @pytest.mark.soak
  def test_worker_of_asynchronous_steps(self, reads):
    self.assert_worker('async', reads)

  def assert_worker(self, mode, reads):
    # Of batches that two workers read for a step each.
    steps = _STEPS // 2 if reads and mode == 'sync' else _STEPS
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(reads, mode=mode))
      self.wait_for_batch(job, 130)
      job.kill('worker', 1)
      job.start('worker', 1)
      run = self.finish(job)
    self.assertEqual(run.iterations, steps)
    self.assertEqual(run.batches, steps)
    # Each row of the last epoch was counted once.
    self.assertEqual(run.rows_counted, programs.ROWS)
    self.assertIn('worker 1', ' '.join(text for _, text in run.logged))
    return run

  @pytest.mark.soak
  def test_worker_that_never_returns(self):
    with parameter_servers.Job() as job:
      job.start_chief(
        programs.train, self.arguments(mode='bounded', max_staleness=0)
      )
      self.wait_for_batch(job, 130)
      job.kill('worker', 0)
      run = self.finish(job)
    self.assertEqual(run.iterations, _STEPS)
    self.assertEqual(run.rows_counted, programs.ROWS)

  @pytest.mark.smoke
  def test_parameter_server(self):
    self.assert_server(0, 'async')

  @parameterized.parameters(0, 1)
  @pytest.mark.soak
  def test_parameter_server_in_the_middle_of_a_group_of_steps(self, server):
    options = {'checkpoint_dir': self.checkpoints, 'checkpoint_steps': 60}
    with parameter_servers.Job() as job:
      arguments = (*self.arguments(validates=False, **options), 20)
      job.start_chief(programs.train, arguments)
      self.wait_for_batch(job, 5)
      job.kill('ps', server)
      job.start('ps', server)
      run = self.finish(job)
    self.assertLen(run.report['recoveries'], 1)
    self.assertEqual(run.iterations, _STEPS)

  @parameterized.parameters(0, 1)
  @pytest.mark.soak
  def test_parameter_server_in_the_first_evaluation(self, server):
    options = {'checkpoint_dir': self.checkpoints, 'checkpoint_steps': 60}
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(validates=True, **options))
      self.wait_for_batch(job, 1, '.test')
      job.kill('ps', server)
      job.start('ps', server)
      run = self.finish(job)
    self.assertEqual(run.iterations, _STEPS)
    self.assertEqual(run.batches, _STEPS)
    for name in ('loss', 'val_loss'):
      self.assertLen(run.history[name], 3)
      self.assertTrue(np.isfinite(run.history[name]).all())

  @pytest.mark.soak
  def test_parameter_server_of_synchronous_steps(self):
    self.assert_server(1, 'sync')

  @tiers.parameters(tiers.soak(0), tiers.soak(1))
  def test_parameter_server_of_synchronous_steps_that_read(self, server):
    self.assert_server(server, 'sync', reads=True)

  def assert_server(self, server, mode, reads=False):
    steps = _STEPS // 2 if reads else _STEPS
    options = {
      'mode': mode,
      'checkpoint_dir': self.checkpoints,
      'checkpoint_steps': 60,
    }
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(reads, **options))
      self.wait_for_batch(job, 130)
      killed_at = time.time()
      job.kill('ps', server)
      time.sleep(1)
      job.start('ps', server)
      run = self.finish(job)
    lost = programs.lost_steps(run)
    self.assertEqual(run.batches, steps)
    lost_by_all = lost if mode == 'sync' else 0
    self.assertEqual(run.iterations, steps - lost_by_all)
    self.assertBetween(lost, 1, 2 * 60)
    self.assertLen(run.report['recoveries'], 1)
    named = [t for t, text in run.logged if f'ps {server}' in text]
    self.assertLess(named[0] - killed_at, 10)

  @pytest.mark.soak
  def test_parameter_server_before_the_first_checkpoint_is_due(self):
    options = {'checkpoint_dir': self.checkpoints, 'checkpoint_steps': 1000}
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(**options))
      self.wait_for_batch(job, 10)
      job.kill('ps', 1)
      job.start('ps', 1)
      run = self.finish(job)
    # It goes on from where it began.
    lost = programs.lost_steps(run)
    self.assertGreaterEqual(lost, 7)
    self.assertEqual(run.batches, _STEPS)
    self.assertEqual(run.iterations, _STEPS)

  @pytest.mark.soak
  def test_restarted_worker_is_another_process(self):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      job.start_chief(programs.watch_worker, (self.progress,))
      self.wait_for_batch(job, 1)
      job.kill('worker', 0)
      job.start('worker', 0)
      self.assertEqual(
        self.finish(job),
        # Connected; listens again, but knows nothing; connected again.
        [(True, True), (True, False), (True, True)],
      )

  @pytest.mark.soak
  def test_parameter_server_without_checkpoints(self):
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments())
      self.wait_for_batch(job, 20)
      job.kill('ps', 1)
      outcome = job.wait()
    self.assertIsInstance(
      outcome.error, errors.ParameterServerUnavailableError, outcome.error_text
    )
    self.assertIn(job.cluster['ps'][1], str(outcome.error))

  @parameterized.parameters(False, True)
  @pytest.mark.soak
  def test_coordinator(self, reads):
    """One that goes on ends where one that was not killed ends, bit by bit."""
    steps, at, saved = (_STEPS // 2, 85, 60) if reads else (_STEPS, 170, 120)
    options = {
      'mode': 'sync',
      'checkpoint_dir': self.checkpoints,
      'checkpoint_steps': 60,
    }
    with parameter_servers.Job() as job:
      arguments = self.arguments(reads, **options)
      resumed = self._kill_and_resume(job, arguments, at)
      # Batches that were done before count but do nothing.
      self.assertEqual(resumed.report['steps'], steps - saved)
      whole = job.run(programs.train, self.arguments(reads, mode='sync'))
    self.assertEqual(resumed.iterations, steps)
    self.assertEqual(whole.iterations, steps)
    for a, b in zip(resumed.weights, whole.weights, strict=True):
      np.testing.assert_array_equal(a, b)

  @pytest.mark.soak
  def test_coordinator_of_workers_that_read(self):
    options = {'checkpoint_dir': self.checkpoints, 'checkpoint_steps': 60}
    with parameter_servers.Job() as job:
      run = self._kill_and_resume(job, self.arguments(True, **options))
    self.assertEqual(run.report['steps'], _STEPS - 120)
    self.assertEqual(run.batches, _STEPS - programs.STEPS_PER_EPOCH)
    self.assertEqual(run.iterations, _STEPS)
    self.assertEqual(run.rows_counted, programs.ROWS)

  @pytest.mark.soak
  def test_coordinator_that_finds_another_number_of_workers(self):
    """Their data are cut otherwise: no element may count twice."""
    options = {'checkpoint_dir': self.checkpoints, 'checkpoint_steps': 60}
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(True, **options))
      self.wait_for_batch(job, 170)
      job.kill('chief')
    with parameter_servers.Job(num_workers=3) as job:
      job.start_chief(programs.train, self.arguments(True, **options))
      outcome = job.wait()
    self.assertIsInstance(
      outcome.error, errors.UnsupportedOptionError, outcome.error_text
    )
    self.assertIn('start 2 workers', str(outcome.error))

  def _kill_and_resume(self, job, arguments, at=170):
    job.start_chief(programs.train, arguments)
    self.wait_for_batch(job, at)
    job.kill('chief')
    job.start_chief(programs.train, arguments)
    return self.finish(job)

  @tiers.parameters(
    'on_train_begin', tiers.soak('built'), tiers.soak('on_epoch_begin')
  )
  def test_parameter_server_before_the_first_checkpoint(self, where):
    """Training begins with what it would have begun with, bit by bit."""
    with parameter_servers.Job() as job:
      whole, _ = job.run(
        programs.train_from_the_start, (self.progress, None, {})
      )
      options = {'checkpoint_dir': self.checkpoints}
      arguments = self.progress, where, options
      job.start_chief(programs.train_from_the_start, arguments)
      self.wait_for_batch(job, 1)
      for server in range(2):
        job.kill('ps', server)
        job.start('ps', server)
      programs.tell(self.progress, 2)
      weights, logged = self.finish(job)
    self.assertIn('was made again', ' '.join(logged))
    for a, b in zip(weights, whole, strict=True):
      np.testing.assert_array_equal(a, b)

  @tiers.parameters(
    # What differs where the numbers do, and where there are more rows.
    ('stream', 'arrays', 'arrays'),
    tiers.soak('stream_computed', 'first batch', 'steps of an epoch'),
    tiers.soak('split', 'arrays', 'arrays'),
    tiers.soak('shuffled', 'arrays', 'arrays'),
    tiers.soak('computed', 'first batch', 'steps of an epoch'),
    tiers.soak('arrays', 'arrays', 'arrays'),
  )
  def test_coordinator_that_finds_other_data(self, kind, numbers, more):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      steps, _ = job.run(
        programs.train_on, (kind, 1.0, 32, 2, self.checkpoints)
      )
      self.assertEqual(steps, 8)
      for scale, rows, difference in ((2.0, 32, numbers), (1.0, 40, more)):
        job.start_chief(
          programs.train_on, (kind, scale, rows, 3, self.checkpoints)
        )
        outcome = job.wait()
        self.assertIsInstance(
          outcome.error, errors.CheckpointMismatchError, outcome.error_text
        )
        self.assertIn(f'data: {difference}', str(outcome.error))
      # The same data in another process; and a run that has finished.
      steps, _ = job.run(
        programs.train_on, (kind, 1.0, 32, 3, self.checkpoints)
      )
      self.assertEqual(steps, 4)
      steps, logged = job.run(
        programs.train_on, (kind, 1.0, 32, 3, self.checkpoints)
      )
      self.assertEqual(steps, 0)
      self.assertIn('which has finished', ' '.join(logged))

  @pytest.mark.soak
  def test_coordinator_that_shuffles_otherwise(self):
    """An order that each process draws anew tells nothing."""
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      for epochs in (1, 2):
        steps, _ = job.run(
          programs.train_on, ('unseeded', 1.0, 32, epochs, self.checkpoints)
        )
        self.assertEqual(steps, 4)

  @pytest.mark.smoke
  def test_newer_coordinator_takes_the_servers(self):
    """The older one ends with an error that names it; it goes on."""
    with parameter_servers.Job(num_ps=1) as job:
      options = {'mode': 'sync', 'checkpoint_dir': self.checkpoints}
      job.start_chief(programs.train, (self.progress, 1000, False, options))
      self.wait_for_batch(job, 20)
      cluster = {**job.cluster, 'chief': processes.addresses(1)}
      epochs = parameter_server_case.EPOCHS
      arguments = self.progress + '.new', epochs, False, options
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
      str(older.error), 'were taken over by run .* .process [0-9]+ on .*Fix'
    )
    self.assertEqual(newer.result().iterations, _STEPS)
    self.assertLess(older.ended_at, newer.result().step_ended[0])

  def test_coordinator_whose_port_is_taken(self):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      message = job.run(programs.start_at_a_taken_port)
    address = job.cluster['chief'][0]
    self.assertRegex(message, f'chief 0 cannot serve at {address}.*Fix: end')

  @pytest.mark.soak
  def test_stopped_server(self):
    """One that neither answers nor dies is named at the deadline."""
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(step_timeout=8.0))
      self.wait_for_batch(job, 20)
      job.signal('ps', 1, signal.SIGSTOP)
      outcome = job.wait()
    self.assertIsInstance(
      outcome.error, errors.WorkerUnavailableError, outcome.error_text
    )
    self.assertIn('No answer from: ps 1 at', str(outcome.error))
    self.assertNotIn('ps 0', str(outcome.error))
    self.assertNotIn('worker', str(outcome.error))

  @pytest.mark.soak
  def test_stopped_worker(self):
    """It counts as lost, though it neither answers nor dies."""
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(keepalive_timeout=3.0))
      self.wait_for_batch(job, 20)
      job.signal('worker', 1, signal.SIGSTOP)
      run = self.finish(job)
    self.assert_whole(run)
    self.assert_given_up(run, 'worker 1')

  @parameterized.parameters(
    ('async', False),
    ('async', True),
    ('sync', False),
    ('sync', True),
    ('bounded', False),
    ('bounded', True),
  )
  @pytest.mark.soak
  def test_stopped_worker_goes_on(self, mode, reads):
    """What it was doing had been done by another one: it does not count twice."""
    seed = int(os.environ.get('TFS_SEED', '20261121'))
    rng = random.Random(f'{seed} {mode} {reads}')
    with parameter_servers.Job() as job:
      job.start_chief(
        programs.train,
        self.arguments(reads, mode=mode, keepalive_timeout=2.0),
      )
      self.wait_for_batch(job, rng.randrange(5, 60))
      job.signal('worker', 1, signal.SIGSTOP)
      time.sleep(3 + 3 * rng.random())
      job.signal('worker', 1, signal.SIGCONT)
      run = self.finish(job)
    # Of batches that two workers read for a step each.
    self.assert_whole(run, _STEPS // 2 if reads and mode == 'sync' else _STEPS)
    self.assert_given_up(run, 'worker 1')

  @parameterized.parameters('sync', 'async')
  @pytest.mark.soak
  def test_workers_that_stop_and_go_on_again_and_again(self, mode):
    """Whatever they were at when they were given up, each step counts once."""
    steps = int(os.environ.get('TFS_STEPS', '300'))
    rng = random.Random(f'{os.environ.get("TFS_SEED", "20261123")} {mode}')
    options = {'mode': mode, 'keepalive_timeout': 1.0}
    stops = 0
    with parameter_servers.Job(deadline=120 + steps) as job:
      job.start_chief(programs.count_steps, (self.progress, steps, options))
      self.wait_for_batch(job, 10)
      while self.batches() < steps - 10 and job.is_alive('chief', 0):
        worker = 'worker', rng.randrange(2)
        job.signal(*worker, signal.SIGSTOP)
        # Some are not given up; most are, and return.
        time.sleep(rng.uniform(0.5, 3.0))
        job.signal(*worker, signal.SIGCONT)
        stops += 1
        # Three workers that are lost in one step would end the run.
        time.sleep(rng.uniform(2.0, 3.0))
      counted, logged = self.finish(job)
    given_up = sum('given up' in text for _, text in logged)
    message = f'{mode}: {steps} steps, {stops} stops, {given_up} given up'
    print(f'{message}, {counted}')
    self.assertGreater(given_up, stops / 3, message)
    self.assert_all_counted(counted, steps, message)

  def assert_all_counted(self, counted, steps, message):
    """Whatever counts steps, in all ways and on all servers, counts so many."""
    self.assertLen(counted, 13, message)
    wrong = {name: count for name, count in counted.items() if count != steps}
    self.assertEqual(wrong, {}, message)

  @tiers.parameters(tiers.soak('async', 60), tiers.soak('sync', 300))
  def test_workers_that_die_in_the_middle_of_steps(self, mode, steps):
    """What a step had written before is not written again by who repeats it."""
    steps = int(os.environ.get('TFS_STEPS', steps))
    rng = random.Random(f'{os.environ.get("TFS_SEED", "20261124")} {mode}')
    kills = 0
    with parameter_servers.Job(deadline=120 + steps) as job:
      job.start_chief(
        programs.count_steps, (self.progress, steps, {'mode': mode})
      )
      self.wait_for_batch(job, 5)
      while self.batches() < steps - 5 and job.is_alive('chief', 0):
        worker = 'worker', rng.randrange(2)
        job.kill(*worker)
        job.start(*worker)
        kills += 1
        self.wait_for_batch(
          job, min(self.batches() + rng.randrange(8, 20), steps)
        )
        time.sleep(rng.uniform(0.0, 0.2))
      counted, logged = self.finish(job)
    lost = sum('lost' in text for _, text in logged)
    message = f'{mode}: {steps} steps, {kills} kills, {lost} lost'
    print(f'{message}, {counted}')
    self.assertGreaterEqual(lost, 2, message)
    self.assert_all_counted(counted, steps, message)

  @pytest.mark.soak
  def test_step_that_was_given_up_is_not_finished(self):
    """It goes on when its worker is given up, and what it writes is refused."""
    with parameter_servers.Job() as job:
      counts = job.run(programs.finish_after_giving_up)
    self.assertEqual(counts, [[1, 1.0, 1.0, 1.0, 1.0]] * 2)

  @tiers.parameters(
    tiers.soak(0, True, 1),
    tiers.soak(0, False, 1),
    tiers.soak(1, True, 10),
    tiers.soak(1, False, 0),
  )
  def test_server_that_stops_in_an_evaluation(self, server, saves, batch):
    """It is given up, waited for, and named."""
    options = {'keepalive_timeout': 2.0, 'recovery_timeout': 5.0}
    if saves:
      options['checkpoint_dir'] = self.checkpoints
    with parameter_servers.Job(deadline=90) as job:
      job.start_chief(programs.train, self.arguments(validates=True, **options))
      self.wait_for_batch(job, 100)
      self.wait_for_batch(job, batch, '.test')
      job.signal('ps', server, signal.SIGSTOP)
      outcome = job.wait()
    self.assertIsInstance(
      outcome.error,
      errors.RendezvousError
      if saves
      else errors.ParameterServerUnavailableError,
      outcome.error_text,
    )
    self.assertIn(f'ps {server}', str(outcome.error))

  @pytest.mark.soak
  def test_server_that_was_given_up_before_an_evaluation(self):
    """Nothing that Keras does first has to do with it, but it is recovered."""
    with parameter_servers.Job() as job:
      job.start_chief(
        programs.evaluate_after_giving_up, (self.progress, self.checkpoints)
      )
      self.wait_for_batch(job, 1)
      job.signal('ps', 1, signal.SIGSTOP)
      time.sleep(10)
      job.signal('ps', 1, signal.SIGCONT)
      losses, recoveries = self.finish(job)
    self.assertAllClose(losses[0], losses[1])
    self.assertLen(recoveries, 1)

  @pytest.mark.soak
  def test_stopped_server_goes_on(self):
    """As if it had died, or, if no call of a step failed, as if nothing had."""
    options = {
      'checkpoint_dir': self.checkpoints,
      'checkpoint_steps': 60,
      'keepalive_timeout': 2.0,
    }
    with parameter_servers.Job() as job:
      job.start_chief(programs.train, self.arguments(**options))
      self.wait_for_batch(job, 130)
      job.signal('ps', 1, signal.SIGSTOP)
      time.sleep(6)
      job.signal('ps', 1, signal.SIGCONT)
      run = self.finish(job)
    self.assert_given_up(run, 'ps 1')
    self.assertEqual(run.batches, _STEPS)
    # It still has its variables: nothing is lost.
    self.assertEqual(programs.lost_steps(run), 0)
    self.assertEqual(run.iterations, _STEPS)

  def assert_given_up(self, run, task):
    """A task was cut off, and no other one."""
    found = [text for _, text in run.logged if 'given up' in text]
    self.assertLen(found, 1)
    self.assertStartsWith(found[0], f'{task} at ')

  def assert_whole(self, run, steps=_STEPS):
    """Each step was done, and each row of the last epoch counted, once."""
    self.assertEqual(run.batches, steps)
    self.assertEqual(run.iterations, steps)
    self.assertEqual(run.rows_counted, programs.ROWS)

  @pytest.mark.soak
  def test_missing_task(self):
    with parameter_servers.Job(missing=[('worker', 1)]) as job:
      began = time.monotonic()
      job.start_chief(programs.train, self.arguments(start_timeout=5.0))
      outcome = job.wait()
    self.assertIsInstance(
      outcome.error, errors.RendezvousError, outcome.error_text
    )
    self.assertIn('worker 1', str(outcome.error))
    self.assertNotIn('worker 0', str(outcome.error))
    self.assertLess(time.monotonic() - began, 90)


if __name__ == '__main__':
  tf.test.main()
