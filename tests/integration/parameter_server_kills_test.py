"""kill -9 at exact places of a step, a save and a load: rows, slots and counts."""

import json
import os
import pathlib
import pickle
import resource
import signal
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import processes
from tests import parameter_servers, tiers
from tests.integration import parameter_server_case
from tests.integration import parameter_server_kills as kills

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MODES = {
  'async': {'mode': 'async'},
  'bounded': {'mode': 'bounded', 'max_staleness': 1},
  'sync': {'mode': 'sync'},
}
_EVERY = 20  # Steps between two checkpoints.
_WORKERS = ('worker', 0), ('worker', 1)
_SERVER = 'ps', 1
_CHIEF = 'chief', 0
_HALF_BYTES = 4096
_ROWS_OF_STEP = 2  # On each server.

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


class _KillsTestCase(parameter_server_case.FaultsTestCase):
  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.progress).parent

  def start_chief(self, job, steps, holds_writes=False, **options):
    options = {'checkpoint_steps': _EVERY, **options}
    arguments = str(self.directory), steps, options, holds_writes
    job.start_chief(kills.train, arguments)

  def hold(self, place):
    """From now on whoever comes to a place stays there."""
    (self.directory / f'{place}.reached').unlink(missing_ok=True)
    (self.directory / place).touch()

  def release(self, place):
    (self.directory / place).unlink()

  def wait_until_reached(self, job, place):
    path = self.directory / f'{place}.reached'
    self._wait(job, path.exists, place)

  def peek(self, job, servers=1):
    """How many updates rows of the table in parts have on the first servers."""
    answer = self.directory / 'peeked'
    answer.unlink(missing_ok=True)
    kills.programs.tell(str(self.directory / 'peek'), servers)
    self._wait(job, answer.exists, 'an answer')
    return list(map(int, answer.read_text().split()))

  def _wait(self, job, condition, what, seconds=120):
    ends_at = time.monotonic() + seconds
    while not condition():
      self.assertTrue(job.is_alive(*_CHIEF), f'the chief ended: {what}')
      self.assertLess(time.monotonic(), ends_at, what)
      time.sleep(0.01)

  def kill_in_step(self, job, place, victim, mode):
    """Kills somebody while rows are on their way, or written on server 0 alone.

    In 'sync', in which servers write when workers are done, before rows are written.
    """
    while not self._stop_in_step(job, place, mode):
      # On a busy machine the worker may wait for server 1 even now. Steps are few, so this ends.
      job.signal(*_SERVER, signal.SIGCONT)
    job.kill(*victim)
    if victim != _SERVER:
      job.signal(*_SERVER, signal.SIGCONT)
    job.start(*victim)

  def _stop_in_step(self, job, place, mode):
    """Stops server 1 in a step; whether server 0 alone has done what it should."""
    self.hold(place)
    self.wait_until_reached(job, place)
    # To take up a worker again the chief asks all servers, and does nothing meanwhile.
    away = self.directory / 'away'
    self._wait(job, lambda: not away.exists(), 'the worker before')
    # What is asked of server 1 from now on it does not do.
    job.signal(*_SERVER, signal.SIGSTOP)
    if place == 'lookup':
      # Somebody has not asked yet.
      (self.directory / f'{place}.reached').unlink()
      self.wait_until_reached(job, place)
    [before] = self.peek(job)
    self.release(place)
    if place == 'update' and mode != 'sync':
      ends_at = time.monotonic() + 10
      while self.peek(job) <= [before]:
        if time.monotonic() > ends_at:
          return False
      return True
    time.sleep(1.5)
    [after] = self.peek(job)
    # The other worker may have looked up a step's two rows before.
    most = 0 if mode == 'sync' else _ROWS_OF_STEP
    self.assertBetween(after - before, 0, most)
    return True

  def kill_in_save(self, job, place, victim, halves=False):
    """Kills somebody where a save is; `halves`: in the middle of a file."""
    self.hold(place)
    self.wait_until_reached(job, place)
    if halves:
      pid = job.pid(*victim)
      resource.prlimit(pid, resource.RLIMIT_FSIZE, (_HALF_BYTES, _HALF_BYTES))
    else:
      job.kill(*victim)
    self.release(place)
    if halves:
      self._wait(job, lambda: not job.is_alive(*victim), 'a half')
      sizes = [
        path.stat().st_size
        for left in pathlib.Path(self.checkpoints).glob('unfinished-*')
        for path in left.iterdir()
      ]
      self.assertIn(_HALF_BYTES, sizes)
    if victim != _CHIEF:
      job.start(*victim)

  def assert_exact(self, found, steps, mode='async', died=(1,)):
    """Every row and slot has each step once, but for those that the log says.

    Of servers that `died` they are missing; in 'sync' of all.
    """
    lost = sum(r['lost_steps'] for r in found['recoveries'])
    is_sync = mode == 'sync'
    print(f'{mode}: {steps} steps, {found["recoveries"]}')
    # What rows become that n steps have updated, each by a gradient of 1.
    sums = np.concatenate(
      [[0.0], np.cumsum(1 / np.sqrt(np.arange(1, steps + 1) + 1e-7))]
    )
    seen = {}
    for name in ('static', 'dynamic'):
      counts = found[name]['counts']
      self.assertTrue(found[name]['is_even'], name)
      self.assertAllEqual(counts, np.round(counts))
      self.assertAllClose(
        found[name]['weights'], sums[counts.astype(int)], 1e-6, 1e-6
      )
      own, shared = counts[:, :2], counts[:, 2:]
      self.assertAllInSet(own, [0.0, 1.0])
      for hot in range(kills.HOT):
        expected = own[hot :: kills.HOT].sum(0)
        for row in shared[hot :: kills.HOT]:
          self.assertAllEqual(row, expected, name)
      seen[name] = own
    self.assertAllEqual(seen['static'], seen['dynamic'])
    self.assertAllEqual(found['uses'], found['dynamic']['counts'])
    missing = steps - seen['static'].sum(0)
    self.assertAllEqual(
      missing, [lost if is_sync or s in died else 0 for s in (0, 1)]
    )
    if is_sync:
      self.assertAllEqual(*seen['static'].T)
    largest, rows = found['others']
    self.assertEqual(largest, 0.0)
    hot_rows = sum(
      len({(i % kills.HOT) for i in np.flatnonzero(own)})
      for own in seen['dynamic'].T
    )
    self.assertEqual(rows, seen['dynamic'].sum() + hot_rows)
    self.assertEqual(sum(found['by_shard']), rows)
    self.assertEqual(found['iterations'], steps - lost if is_sync else steps)
    # Nothing is left of what was interrupted.
    self.assertEqual(self.left(), [])
    self.assertLessEqual(len(self.kept()), 4)


class ExactTest(_KillsTestCase):
  """What is not exact is seen."""

  def setUp(self):
    super().setUp()
    os.mkdir(self.checkpoints)

  def test_exact(self):
    self.assert_exact(kills.exact(20), 20)

  @tiers.named_parameters(
    ('step_that_one_table_has_not', 'static', 'counts', (3, 0), 0.0),
    ('step_that_counts_twice', 'dynamic', 'counts', (3, 1), 2.0),
    ('shared_row', 'static', 'counts', (3, 2), 1.0),
    ('row_without_its_slot', 'static', 'weights', (3, 0), 0.0),
  )
  def test_mutation(self, table, what, place, value):
    found = kills.exact(20)
    found[table] = {k: np.copy(v) for k, v in found[table].items()}
    found[table][what][place] = value
    with self.assertRaises(AssertionError):
      self.assert_exact(found, 20)

  def test_loss_that_is_not_in_the_log(self):
    found = kills.exact(20)
    found['recoveries'] = [{'server': 1, 'lost_steps': 1}]
    with self.assertRaises(AssertionError):
      self.assert_exact(found, 20)


class StepKillsTest(_KillsTestCase):
  @tiers.parameters('async', tiers.full('bounded'), tiers.full('sync'))
  def test_rows_and_slots_are_those_of_the_log(self, mode):
    """Of workers nothing is lost; of a server the steps since the checkpoint."""
    steps = 120
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, **_MODES[mode])
      for begun, place, victim in (
        (5, 'lookup', _WORKERS[1]),
        (30, 'update', _WORKERS[0]),
        (55, 'lookup', _SERVER),
        (87, 'update', _SERVER),
      ):
        self.wait_for_batch(job, begun)
        self.kill_in_step(job, place, victim, mode)
      found = self.finish(job)
    self.assertLen(found['recoveries'], 2)
    for recovery in found['recoveries']:
      self.assertEqual(recovery['server'], 1)
      self.assertBetween(recovery['lost_steps'], 0, _EVERY + 4)
    self.assert_exact(found, steps, mode)

  @tiers.product(
    mode=('async', tiers.full('bounded')), place=('lock', 'loop 1')
  )
  def test_update_that_has_not_begun_to_write(self, mode, place):
    """The end of its worker ends the wait, or a loop, and the step is repeated."""
    steps = 40
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, holds_writes=True, **_MODES[mode])
      for begun in (5, 20):
        self.wait_for_batch(job, begun)
        self.hold(place)
        self.wait_until_reached(job, place)
        self.wait_until_quiet()
        for victim in _WORKERS:
          job.kill(*victim)
          job.start(*victim)
        time.sleep(1.5)  # Until the server knows.
        self.release(place)
      found = self.finish(job)
    self.assertEqual(found['recoveries'], [])
    self.assert_exact(found, steps, mode, died=())

  @tiers.parameters('async', tiers.full('bounded'))
  def test_updates_that_wait_for_another(self, mode):
    """Workers die: nobody else begins while one is being written."""
    steps, rows = 60, self.directory / 'rows 1'
    with parameter_servers.Job(num_workers=3) as job:
      self.start_chief(job, steps, holds_writes=True, **_MODES[mode])
      for begun, victims in ((5, (0, 1)), (30, (2, 1))):
        self.wait_for_batch(job, begun)
        with kills.rows_held(rows):
          self.wait_until_quiet()
          began = set(self.directory.glob('began-1-*'))
          for victim in victims:
            job.kill('worker', victim)
            job.start('worker', victim)
            self.wait_until_quiet()
          self.assertEqual(set(self.directory.glob('began-1-*')), began)
      found = self.finish(job)
    self.assertEqual(found['recoveries'], [])
    self.assert_exact(found, steps, mode, died=())

  @tiers.parameters(1, tiers.full(0))
  def test_update_that_one_server_has_and_the_other_has_not(self, died):
    """In 'sync': both are what the checkpoint has, and nothing comes late."""
    steps = 3 * _EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, holds_writes=True, mode='sync')
      self.wait_for_batch(job, _EVERY + 8)
      self.hold('write 1')
      self.wait_until_reached(job, 'write 1')
      # Of a step two rows are on each server.
      ends_at = time.monotonic() + 20
      while (peeked := self.peek(job, 2))[0] != peeked[1] + _ROWS_OF_STEP:
        self.assertLess(time.monotonic(), ends_at, peeked)
        time.sleep(0.1)
      self.hold('restored')
      job.kill('ps', died)
      job.start('ps', died)
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
    self.assertBetween(recovery['lost_steps'], 1, _EVERY)
    self.assert_exact(found, steps, 'sync')


class SaveKillsTest(_KillsTestCase):
  @tiers.parameters('async', tiers.full('bounded'), tiers.full('sync'))
  def test_workers_that_die_in_saves(self, mode):
    """Nothing is lost, nor done twice."""
    steps = 4 * _EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, **_MODES[mode])
      for i, place in enumerate(('pieces', 'columns', 'manifest')):
        self.wait_for_batch(job, 1 + i * _EVERY)
        self.kill_in_save(job, place, _WORKERS[i % 2])
      found = self.finish(job)
    self.assertEqual(found['recoveries'], [])
    self.assert_exact(found, steps, mode)

  @tiers.parameters('async', tiers.full('sync'))
  def test_server_that_dies_in_a_save(self, mode):
    """Also with a half of a file written."""
    steps = 5 * _EVERY
    with parameter_servers.Job(serve=kills.serve) as job:
      self.start_chief(job, steps, **_MODES[mode])
      for i, (place, halves) in enumerate(
        (
          ('pieces', False),
          ('pieces', True),
          ('manifest', False),
          ('columns', False),
        )
      ):
        self.wait_for_batch(job, 1 + i * _EVERY)
        self.kill_in_save(job, place, _SERVER, halves)
      found = self.finish(job)
    self.assertNotEmpty(found['recoveries'])
    self.assert_exact(found, steps, mode)

  @pytest.mark.full
  def test_server_that_dies_again_while_two_are_restored(self):
    """Between the ids of a dynamic table and their rows; the other has some then."""
    steps = 3 * _EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps)
      self.wait_for_batch(job, _EVERY + 8)
      self.hold('load columns')
      for server in (0, 1):
        job.kill('ps', server)
        job.start('ps', server)
      self.wait_until_reached(job, 'load columns')
      job.kill(*_SERVER)
      self.release('load columns')
      job.start(*_SERVER)
      found = self.finish(job)
    self.assertLen(found['recoveries'], 1)
    self.assertBetween(found['recoveries'][0]['lost_steps'], 1, _EVERY)
    self.assert_exact(found, steps, died=(0, 1))

  @pytest.mark.full
  def test_server_that_writes_late(self):
    """Into the directory of a save that was given up, while others are made."""
    steps = 5 * _EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, keepalive_timeout=2.0)
      self.wait_for_batch(job, 1)
      self.hold('pieces')
      self.wait_until_reached(job, 'pieces')
      job.signal(*_SERVER, signal.SIGSTOP)
      self.release('pieces')
      time.sleep(8.0)
      job.signal(*_SERVER, signal.SIGCONT)
      found = self.finish(job)
    self.assert_exact(found, steps)

  @pytest.mark.full
  def test_chief_that_dies_in_saves_and_loads(self):
    """The last whole checkpoint is loaded, and each step counts once."""
    steps = 8 * _EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps)
      for i, place in enumerate(
        ('pieces', 'columns', 'manifest', 'rename', 'named')
      ):
        self.wait_for_batch(job, 1 + i * _EVERY)
        self.hold(place)
        before = self.kept()[-1:]
        self.wait_until_reached(job, place)
        job.kill(*_CHIEF)
        self.release(place)
        is_saved = self.kept()[-1:] != before
        self.assertEqual(is_saved, place == 'named', place)
        # Of the deaths before it nothing is left.
        self.assertLen(self.left(), 0 if is_saved else 1, place)
        self.start_chief(job, steps)
      found = self.finish(job)
    self.assertGreater(found['began'], 0)
    self.assert_exact(found, steps)


class LoadKillsTest(_KillsTestCase):
  @tiers.parameters('sync', tiers.soak('bounded'), tiers.full('async'))
  def test_tasks_that_die_in_a_load(self, mode):
    """A worker and a server at once; then the others, while it is loaded again."""
    steps = 3 * _EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps, **_MODES[mode])
      self.wait_for_batch(job, _EVERY + 8)
      job.kill(*_CHIEF)
      places = 'load', 'load columns'
      for place in places:
        self.hold(place)
      self.start_chief(job, steps, **_MODES[mode])
      for index, place in zip((1, 0), places, strict=True):
        self.wait_until_reached(job, place)
        victims = ('worker', index), ('ps', index)
        for victim in victims:
          job.kill(*victim)
        for victim in victims:
          job.start(*victim)
        self.release(place)
      found = self.finish(job)
    self.assertEqual(found['began'], _EVERY)
    self.assertNotEmpty(found['recoveries'])
    self.assert_exact(found, steps, mode)


class GrowthTest(_KillsTestCase):
  def test_two_servers_become_three(self):
    """Killed in the last save on two, and in each part of the load on three."""
    steps = 4 * _EVERY
    with parameter_servers.Job() as job:
      self.start_chief(job, steps)
      self.wait_for_batch(job, 30)
      self.hold('rename')
      self.wait_until_reached(job, 'rename')
      job.kill(*_CHIEF)
      self.release('rename')
    with parameter_servers.Job(num_ps=3) as job:
      for place, victim in (
        ('load', _CHIEF),
        ('load', ('ps', 2)),
        ('load columns', ('ps', 2)),
      ):
        self.hold(place)
        if not (victim != _CHIEF and place == 'load columns'):
          self.start_chief(job, steps)
        self.wait_until_reached(job, place)
        job.kill(*victim)
        if victim != _CHIEF:
          job.start(*victim)
        if place == 'load' and victim != _CHIEF:
          self.hold('load columns')
        self.release(place)
      found = self.finish(job)
    self.assertEqual(found['began'], _EVERY)
    self.assertNotIn(0, found['by_shard'])
    self.assertLen(found['by_shard'], 3)
    self.assert_exact(found, steps)

  @pytest.mark.full
  def test_a_job_is_stopped_and_launched_with_one_more(self):
    """As the page of parameter servers says."""
    steps = 200
    with self._launch(2, steps) as job:
      job.wait_until(lambda: self.batches() >= 50)
      job.signal(signal.SIGTERM)
      self.assertEqual(job.wait(), 143, job.output()[-5000:])
      # The steps that were begun are done, and saved.
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
    arguments = [str(self.directory), steps, {'checkpoint_steps': _EVERY}]
    launcher = [sys.executable, '-m', 'tf_strategies.launch', '--chief']
    launcher += ['--num_workers=2', f'--num_ps={servers}', '--grace_period=60']
    path = os.pathsep.join(filter(None, sys.path))
    return processes.Command(
      [*launcher, '--', *program, json.dumps(arguments)],
      name='the job',
      cwd=_ROOT,
      env=processes.environment({'PYTHONPATH': path}),
      deadline_seconds=180,
      grace_seconds=20.0,
    )


if __name__ == '__main__':
  tf.test.main()
