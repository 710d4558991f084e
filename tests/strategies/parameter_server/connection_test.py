"""Which tasks count as dead, with a cluster whose deaths a test decides."""

import contextlib
import queue
from unittest import mock

import tensorflow as tf
from absl.testing import absltest, parameterized

from tf_strategies import _tf_internal, errors
from tf_strategies.cluster import config as config_lib
from tf_strategies.strategies.parameter_server import connection, keepalive

_TASKS = [('ps', 0), ('ps', 1), ('worker', 0), ('worker', 1)]


class LivenessTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    # Processes that run, and those of them that this one has connected to.
    self.running, self.known = set(_TASKS), set(_TASKS)
    # How often each was started, as far as this one knows.
    self.starts = dict.fromkeys(_TASKS, 1)
    self.seen = dict(self.starts)
    cluster = mock.create_autospec(config_lib.ClusterConfig, instance=True)
    cluster.jobs = {
      job: [f'{job}-{i}:1' for i in range(2)] for job in ('ps', 'worker')
    }
    # What happens while it is connected; and who was connected to in two parts.
    self.die_meanwhile = ()
    self.anew = []
    for patch in (
      mock.patch.multiple(
        keepalive,
        ask=lambda address, *_: self.ask(address),
        peers_of=lambda address: frozenset(),
        watching=self.watching,
      ),
      mock.patch.multiple(
        connection,
        _SETTLE_SECONDS=0.0,
        wait_for_tasks=lambda *_: None,
        _runs_ops=lambda job, i: (job, i) in self.known,
      ),
      mock.patch.multiple(
        _tf_internal,
        connect_again=self.connect,
        incarnations=lambda: self.seen,
      ),
    ):
      self.enter_context(patch)
    self.liveness = connection.Liveness(cluster)
    self.addCleanup(self.liveness.close)

  def test_server_that_does_not_tell_who_drives_it_is_named(self):
    lease = mock.Mock()
    lease.take.side_effect = tf.errors.UnavailableError(None, None, 'gone')
    with self.assertRaisesRegex(
      errors.ParameterServerUnavailableError, 'ps 0 at ps-0:1'
    ):
      self.liveness.hold_lease(lease, lambda error: None)

  def test_watch_goes_on_when_it_cannot_read_who_drives_the_servers(self):
    lease, taken = mock.Mock(), queue.SimpleQueue()
    error = errors.TakenOverError('another chief')
    lease.check.side_effect = [ValueError('half a record'), error]
    with (
      mock.patch.object(connection, '_LEASE_SECONDS', 0.01),
      self.assertLogs(level='WARNING') as logs,
    ):
      self.liveness.hold_lease(lease, taken.put)
      self.assertIs(taken.get(timeout=60), error)
    self.assertIn('ValueError: half a record', logs.output[0])

  def ask(self, address):
    job, _, rest = address.partition('-')
    is_up = (job, int(rest[0])) in self.running
    return keepalive.Answer.HELLO if is_up else keepalive.Answer.REFUSED

  @contextlib.contextmanager
  def watching(self, addresses):
    self.assertEqual(set(addresses), set(_TASKS))
    before = dict(self.starts)
    yield lambda: {t for t in _TASKS if self.starts[t] != before[t]}

  def connect(self, anew):
    self.anew.append(set(anew))
    self.seen = dict(self.starts)
    self.restart(*self.die_meanwhile)
    self.known = set(self.running)

  def restart(self, *tasks):
    self.known -= set(tasks)
    for task in tasks:
      self.starts[task] += 1

  def test_server_that_a_worker_came_back_with_is_dead_until_it_is_restored(
    self,
  ):
    """Connecting to the worker connects to the server, which has nothing."""
    self.restart(('worker', 1), ('ps', 1))
    self.assertTrue(self.liveness.rejoin(1))
    error = self.liveness.server_error()
    self.assertEqual((error.server, error.address), (1, 'ps-1:1'))
    self.assertIn('ps 1 at ps-1:1', str(error))
    self.liveness.wait_for_all(10.0)
    self.assertIsNone(self.liveness.server_error())

  def test_tasks_that_die_while_it_connects_are_dead_until_they_are_taken_up(
    self,
  ):
    self.restart(('worker', 1))
    self.die_meanwhile = ('ps', 0), ('worker', 0)
    # It has the devices of those before, for good.
    self.assertFalse(self.liveness.rejoin(1))
    self.die_meanwhile = ()
    self.assertTrue(self.liveness.rejoin(1))
    self.assertEqual(self.anew, [set(), {('ps', 0), ('worker', 0)}])
    self.assertTrue(self.liveness.is_worker_alive(1))
    self.assertFalse(self.liveness.is_worker_alive(0))
    self.assertEqual(self.liveness.server_error().server, 0)
    self.assertTrue(self.liveness.rejoin(0))
    self.assertTrue(self.liveness.is_worker_alive(0))
    self.assertEqual(self.liveness.server_error().server, 0)
    self.liveness.wait_for_all(10.0)
    self.assertIsNone(self.liveness.server_error())

  def test_of_an_attempt_that_fails_some_tasks_may_know(self):
    self.restart(('worker', 1))
    self.die_meanwhile = (('ps', 0),)

    def fail(anew):
      self.connect(anew)
      raise tf.errors.UnavailableError(None, None, 'gone')

    with (
      mock.patch.object(_tf_internal, 'connect_again', fail),
      self.assertRaises(tf.errors.UnavailableError),
    ):
      self.liveness.rejoin(1)
    self.die_meanwhile = ()
    self.assertTrue(self.liveness.rejoin(1))
    self.assertEqual(self.anew, [set(), {('ps', 0)}])

  def test_server_that_was_given_up_lacks_functions_until_it_is_restored(self):
    self.restart(('worker', 1))
    with mock.patch.object(
      self.liveness._keepalive, 'is_disconnected', lambda t: t == ('ps', 1)
    ):
      self.assertTrue(self.liveness.rejoin(1))
    self.assertEqual(self.liveness.server_error().server, 1)

  def test_task_that_dies_while_all_are_connected_to(self):
    self.die_meanwhile = (('ps', 1),)
    connect = self.connect

    def connect_once(anew):
      connect(anew)
      self.die_meanwhile = ()

    with mock.patch.object(_tf_internal, 'connect_again', connect_once):
      self.liveness.wait_for_all(10.0)
    self.assertEqual(self.anew, [set(), {('ps', 1)}])
    self.assertIsNone(self.liveness.server_error())


class LeaseTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # There is no server: the file is in the memory of this process.
    self.enter_context(
      mock.patch.multiple(
        connection,
        _SERVER='/device:CPU:0',
        _FILE=f'ram://lease_test/chiefs/{self.id()}',
      )
    )
    self.other = connection.Lease()
    self.other._record |= {'process': 'other', 'pids': ''}

  def test_older_chief_that_leaves_takes_nothing_from_the_newer_one(self):
    mine = connection.Lease()
    self.other.take()
    with mock.patch.object(connection, '_LEAVE_SECONDS', 0.0):
      mine.take()
    self.other.leave()
    before = connection._read()
    mine.check()
    self.assertEqual(connection._read(), before)
    self.assertEqual(connection._newest(before), mine._record)

  def test_waits_for_the_older_chief_also_if_it_left_before(self):
    self.other.take()
    self.other.leave()
    self.other._add(self.other._record)
    waited = []

    def leave(seconds):
      waited.append(seconds)
      self.other.leave()

    with mock.patch.object(connection.time, 'sleep', leave):
      connection.Lease().take()
    self.assertLen(waited, 1)

  def test_older_chief_is_told(self):
    mine = connection.Lease()
    mine.take()
    self.other._add(self.other._record)
    with self.assertRaisesRegex(errors.TakenOverError, 'taken over the'):
      mine.check()
    self.other.leave()
    mine.check()  # Nobody has the servers any more.
    self.assertEqual(connection._newest(connection._read()), mine._record)


if __name__ == '__main__':
  absltest.main()
