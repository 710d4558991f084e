"""kill -9 at exact points of a step, a save and a load: rows, slots and counts."""

import json
import os
import pathlib
import pickle
import signal
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from benchmarks import processes
from tests import parameter_servers, tiers
from tests.integration import parameter_server_kills as kills
from tests.integration import parameter_server_kills_case as case

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class ExactTest(case.KillsTestCase):
  """The comparison detects results that are not exact."""

  def setUp(self):
    super().setUp()
    os.mkdir(self.checkpoints)

  def test_inexact_results_are_detected(self):
    self.assert_exact(kills.exact(20), 20)
    for table, array, point, value in (
      # A step that one table misses, or that counts twice; a shared row; a row
      # without its slot.
      ('static', 'counts', (3, 0), 0.0),
      ('dynamic', 'counts', (3, 1), 2.0),
      ('static', 'counts', (3, 2), 1.0),
      ('static', 'weights', (3, 0), 0.0),
    ):
      found = kills.exact(20)
      found[table] = {k: np.copy(v) for k, v in found[table].items()}
      found[table][array][point] = value
      with self.assertRaises(AssertionError):
        self.assert_exact(found, 20)
    # The log reports a lost step, but no step is missing.
    found = kills.exact(20) | {'recoveries': [{'server': 1, 'lost_steps': 1}]}
    with self.assertRaises(AssertionError):
      self.assert_exact(found, 20)


class StepKillsTest(case.KillsTestCase):
  @tiers.parameters('async', tiers.soak('bounded'), tiers.soak('sync'))
  def test_rows_and_slots_miss_only_the_logged_steps(self, mode):
    """Checks that workers lose no steps, and servers only steps since the
    checkpoint.
    """
    steps = 70
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, **case.MODES[mode])
      for begun, point, victim in (
        (5, 'lookup', case.WORKERS[1]),
        (15, 'update', case.WORKERS[0]),
        (28, 'lookup', case.SERVER),
        (50, 'update', case.SERVER),
      ):
        self.wait_for_batch(job, begun)
        self.kill_in_step(job, point, victim, mode)
      found = self.finish(job)
    self.assertLen(found['recoveries'], 2)
    for recovery in found['recoveries']:
      self.assertEqual(recovery['server'], 1)
      self.assertBetween(recovery['lost_steps'], 0, case.EVERY + 4)
    self.assert_exact(found, steps, mode)

  @parameterized.parameters(
    *[(mode, point) for mode in case.MODES for point in ('loop 1', 'lock')]
  )
  @pytest.mark.soak
  def test_workers_die_before_rows_are_written(self, mode, point):
    """Checks that the death of workers does not end an update that has begun."""
    steps = 40
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, holds_writes=True, **case.MODES[mode])
      for begun in (5, 20):
        self.hold_at(job, begun, point)
        self.wait_until_quiet()
        for victim in case.WORKERS:
          job.restart(*victim)
        time.sleep(1.5)  # Until the servers know.
        self.release(point)
      found = self.finish(job)
    self.assertEqual(found['recoveries'], [])
    self.assert_exact(found, steps, mode, died=())

  def began_on_1(self):
    """Returns the files of the units that have begun to write rows on server 1."""
    return set(self.directory.glob('began-1-*'))

  @parameterized.parameters('async', 'bounded')
  @pytest.mark.soak
  def test_updates_wait_for_another_update(self, mode):
    """Checks that no other update begins during a write, although workers die."""
    steps, rows = 60, self.directory / 'rows 1'
    with parameter_servers.Job(num_workers=3) as job:
      self.start_chief(job, steps, holds_writes=True, **case.MODES[mode])
      for begun, victims in ((5, (0, 1)), (30, (2, 1))):
        self.wait_for_batch(job, begun)
        with kills.rows_held(rows):
          began = None
          while began != (began := self.began_on_1()):
            for _ in range(4):  # A step may take this long on a busy machine.
              self.wait_until_quiet()
          for victim in victims:
            job.restart('worker', victim)
            self.wait_until_quiet()
          self.assertEqual(self.began_on_1(), began)
      found = self.finish(job)
    self.assertEqual(found['recoveries'], [])
    self.assert_exact(found, steps, mode, died=())

  @parameterized.parameters(1, 0)
  @pytest.mark.soak
  def test_update_applied_on_one_server_only_is_undone(self, died):
    """Checks that both servers are restored, and no late write arrives."""
    steps = 3 * case.EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, holds_writes=True, mode='sync')
      self.hold_at(job, case.EVERY + 8, 'write 1')
      # Each step has two rows on each server.
      ends_at = time.monotonic() + 20
      while (peeked := self.peek(job, 2))[0] != peeked[1] + case.ROWS_OF_STEP:
        self.assertLess(time.monotonic(), ends_at, peeked)
        time.sleep(0.1)
      self.hold('restored')
      job.restart('ps', died)
      if died == 1:
        self.release('write 1')
      self.wait_until_reached(job, 'restored')
      if died == 0:
        self.release('write 1')
        time.sleep(1.0)
      self.release('restored')
      found = self.finish(job)
    [recovery] = found['recoveries']
    self.assertEqual(recovery['server'], died)
    self.assertBetween(recovery['lost_steps'], 1, case.EVERY)
    self.assert_exact(found, steps, 'sync', died=(died,))

  @parameterized.parameters('async', 'sync')
  @pytest.mark.soak
  def test_server_dies_again_during_a_reconnect(self, mode):
    """Checks that TensorFlow does not keep the devices of the first server."""
    steps = 12 * case.EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, **case.MODES[mode])
      for begun, seconds in ((1, 0.05), (3, 0.1), (5, 0.02)):
        self.wait_for_batch(job, begun * case.EVERY)
        self.hold('connect')
        for victim in (case.WORKERS[0], case.SERVER):
          job.restart(*victim)
        self.wait_until_reached(job, 'connect')
        self.release('connect')
        time.sleep(seconds)
        job.restart(*case.SERVER)
      found = self.finish(job)
    self.assertEqual({r['server'] for r in found['recoveries']}, {1})
    self.assert_exact(found, steps, mode)


class SaveKillsTest(case.KillsTestCase):
  @tiers.product(
    job_name=('ps', tiers.soak('worker')),
    mode=('async', tiers.soak('bounded'), tiers.soak('sync')),
  )
  def test_tasks_die_during_a_save(self, job_name, mode):
    """Kills tasks at points before and after rows are read. Workers lose no steps."""
    steps = 4 * case.EVERY
    with parameter_servers.Job(serve=kills.serve) as job:
      self.start_chief(job, steps, **case.MODES[mode])
      for i, point in enumerate(('rows', 'manifest', 'columns')):
        self.wait_for_batch(job, 1 + i * case.EVERY)
        victim = job_name, 1 if job_name == 'ps' else i % 2
        self.kill_in_save(job, point, victim)
      found = self.finish(job)
    self.assertEqual(bool(found['recoveries']), job_name == 'ps')
    self.assert_exact(found, steps, mode)

  @pytest.mark.soak
  def test_server_dies_again_during_a_restore(self):
    """Kills a server between the ids and the rows of a dynamic table."""
    steps = 3 * case.EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps)
      self.wait_for_batch(job, case.EVERY + 8)
      self.hold('load columns')
      for server in (0, 1):
        job.restart('ps', server)
      self.wait_until_reached(job, 'load columns')
      job.kill(*case.SERVER)
      self.release('load columns')
      job.start(*case.SERVER)
      found = self.finish(job)
    [recovery] = found['recoveries']
    self.assertBetween(recovery['lost_steps'], 1, case.EVERY)
    self.assert_exact(found, steps, died=(0, 1))

  @pytest.mark.soak
  def test_save_with_a_stopped_server_is_exact(self):
    steps = 5 * case.EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, keepalive_timeout=2.0)
      self.hold_at(job, 1, 'rows')
      job.signal(*case.SERVER, signal.SIGSTOP)
      self.release('rows')
      time.sleep(8.0)
      job.signal(*case.SERVER, signal.SIGCONT)
      found = self.finish(job)
    self.assert_exact(found, steps)

  @pytest.mark.soak
  def test_chief_dies_during_saves_and_loads(self):
    """Checks that the last complete checkpoint is loaded and each step counts once."""
    steps = 8 * case.EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps)
      for i, point in enumerate(
        ('rows', 'columns', 'manifest', 'rename', 'named')
      ):
        self.wait_for_batch(job, 1 + i * case.EVERY)
        self.hold(point)
        before = self.kept()[-1:]
        self.wait_until_reached(job, point)
        job.kill(*case.CHIEF)
        self.release(point)
        is_saved = self.kept()[-1:] != before
        self.assertEqual(is_saved, point == 'named', point)
        # Earlier deaths have unfinished no files.
        self.assertLen(self.unfinished(), 0 if is_saved else 1, point)
        self.start_chief(job, steps)
      found = self.finish(job)
    self.assertGreater(found['began'], 0)
    self.assert_exact(found, steps)


class LoadKillsTest(case.KillsTestCase):
  @tiers.parameters(
    ('async', 3), tiers.soak('sync', 2), tiers.soak('bounded', 2)
  )
  def test_tasks_die_during_a_load(self, mode, servers):
    """Kills the chief during the last save on two servers, and all tasks in the load
    on this many servers.
    """
    steps = 3 * case.EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, **case.MODES[mode])
      self.hold_at(job, case.EVERY + 8, 'rename')
      job.kill(*case.CHIEF)
      self.release('rename')
    with parameter_servers.Job(num_ps=servers) as job:
      self.hold('load')
      self.start_chief(job, steps, **case.MODES[mode])
      self.wait_until_reached(job, 'load')
      job.kill(*case.CHIEF)
      points = 'load', 'load columns'
      for point in points:
        self.hold(point)
      self.start_chief(job, steps, **case.MODES[mode])
      for i, point in enumerate(points):
        self.wait_until_reached(job, point)
        victims = ('worker', i), ('ps', servers - 1 - i)
        for victim in victims:
          job.kill(*victim)
        for victim in victims:
          job.start(*victim)
        self.release(point)
      found = self.finish(job)
    self.assertEqual(found['began'], case.EVERY)
    self.assertNotEmpty(found['recoveries'])
    self.assertLen(found['by_shard'], servers)
    self.assertNotIn(0, found['by_shard'])
    self.assert_exact(found, steps, mode)

  @pytest.mark.soak
  def test_job_is_relaunched_with_one_more_server(self):
    """Follows the page of parameter servers."""
    steps = 200
    with self._launch(2, steps) as job:
      job.wait_until(lambda: self.batches() >= 50)
      job.signal(signal.SIGTERM)
      self.assertEqual(job.wait(), 143, job.output()[-5000:])
      # The begun steps are finished and saved.
      self.assertIn('saved', job.output())
    begun = self.batches()
    with self._launch(3, steps) as job:
      self.assertEqual(job.wait(), 0, job.output()[-5000:])
    found = pickle.loads((self.directory / 'found').read_bytes())
    self.assertEqual(found['began'], begun)
    self.assertLen(found['by_shard'], 3)
    self.assert_exact(found, steps)

  def _launch(self, servers, steps):
    program = [sys.executable, '-m', 'tests.integration.parameter_server_kills']
    arguments = [str(self.directory), steps, {'checkpoint_steps': case.EVERY}]
    launcher = [sys.executable, '-m', 'tf_strategies.launch', '--chief']
    launcher += ['--num_workers=2', f'--num_ps={servers}', '--grace_period=60']
    return processes.Command(
      [*launcher, '--', *program, json.dumps(arguments)],
      name='the job',
      cwd=_ROOT,
      env=processes.python_environment(),
      deadline_seconds=180,
      grace_seconds=20.0,
    )


if __name__ == '__main__':
  tf.test.main()
