"""Shared code of the tests that kill tasks at exact points."""

import pathlib
import signal
import time

import numpy as np

from tests.integration import parameter_server_case
from tests.integration import parameter_server_kills as kills

MODES = {
  'async': {'mode': 'async'},
  'bounded': {'mode': 'bounded', 'max_staleness': 1},
  'sync': {'mode': 'sync'},
}
EVERY = 20  # Steps between two checkpoints.
WORKERS = ('worker', 0), ('worker', 1)
SERVER = 'ps', 1
CHIEF = 'chief', 0
ROWS_OF_STEP = 2  # On each server.
_HALF_BYTES = 4096


class KillsTestCase(parameter_server_case.FaultsTestCase):
  """A chief of `parameter_server_kills`, and checks of its results."""

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.progress).parent

  def start_chief(self, job, steps, holds_writes=False, **options):
    options = {'checkpoint_steps': EVERY, **options}
    arguments = str(self.directory), steps, options, holds_writes
    job.start_chief(kills.train, arguments)

  def hold(self, point):
    """Makes every task that reaches the point wait there from now on."""
    (self.directory / f'{point}.reached').unlink(missing_ok=True)
    (self.directory / point).touch()

  def hold_at(self, job, batch, point):
    """Holds a point after a batch, and waits until a task reaches it."""
    self.wait_for_batch(job, batch)
    self.hold(point)
    self.wait_until_reached(job, point)

  def release(self, point):
    (self.directory / point).unlink()

  def wait_until_reached(self, job, point):
    path = self.directory / f'{point}.reached'
    self._wait(job, path.exists, point)

  def peek(self, job, servers=1):
    """Returns the updates of the partitioned table's rows on the first servers."""
    answer = self.directory / 'peeked'
    answer.unlink(missing_ok=True)
    kills.programs.write_number(str(self.directory / 'peek'), servers)
    self._wait(job, answer.exists, 'an answer')
    return list(map(int, answer.read_text().split()))

  def _wait(self, job, condition, awaited, seconds=120):
    ends_at = time.monotonic() + seconds
    while not condition():
      self.assertTrue(job.is_alive(*CHIEF), f'the chief ended: {awaited}')
      self.assertLess(time.monotonic(), ends_at, awaited)
      time.sleep(0.01)

  def kill_in_step(self, job, point, victim, mode):
    """Kills a task while rows are in transit, or about to be written."""
    self._stop_in_step(job, point, mode)
    job.kill(*victim)
    if victim != SERVER:
      job.signal(*SERVER, signal.SIGCONT)
    job.start(*victim)

  def _stop_in_step(self, job, point, mode):
    """Stops server 1 in a step."""
    self.hold(point)
    self.wait_until_reached(job, point)
    # Before the chief uses a returned worker, it only asks all servers.
    away = self.directory / 'away'
    self._wait(job, lambda: not away.exists(), 'the previous worker')
    # From now on, server 1 executes no request.
    job.signal(*SERVER, signal.SIGSTOP)
    if point == 'lookup':
      # The other worker has not sent its request yet.
      (self.directory / f'{point}.reached').unlink()
      self.wait_until_reached(job, point)
    [before] = self.peek(job)
    self.release(point)
    time.sleep(1.5)
    [after] = self.peek(job)
    # Both workers' steps may be applied.
    most = 0 if mode == 'sync' else 2 * ROWS_OF_STEP
    self.assertBetween(after - before, 0, most)

  def kill_in_save(self, job, point, victim):
    """Kills a task during a save."""
    self.hold(point)
    self.wait_until_reached(job, point)
    job.kill(*victim)
    self.release(point)
    if victim != CHIEF:
      job.start(*victim)

  def assert_exact(self, found, steps, mode='async', died=(1,)):
    """Checks that every row and slot has each step once, except for logged losses.

    All servers have lost these steps. Servers that did not die are in no log.
    """
    steps_of = {r['server']: r['lost_steps'] for r in found['recoveries']}
    self.assertContainsSubset({s for s, lost in steps_of.items() if lost}, died)
    lost = sum(recovery['lost_steps'] for recovery in found['recoveries'])
    print(f'{mode}: {steps} steps, {found["recoveries"]}')
    # The values of rows after n updates with a gradient of 1.
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
    self.assertAllEqual(missing, [lost] * 2)
    self.assertAllEqual(*seen['static'].T)
    largest, rows = found['others']
    self.assertEqual(largest, 0.0)
    hot_rows = sum(
      len({(i % kills.HOT) for i in np.flatnonzero(own)})
      for own in seen['dynamic'].T
    )
    self.assertEqual(rows, seen['dynamic'].sum() + hot_rows)
    self.assertEqual(sum(found['by_shard']), rows)
    self.assertEqual(found['iterations'], steps - lost)
    # Interrupted checkpoints have been deleted.
    self.assertEqual(self.unfinished(), [])
    self.assertLessEqual(len(self.kept()), 4)
