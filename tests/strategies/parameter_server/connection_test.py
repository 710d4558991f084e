"""Detection of dead tasks in a simulated cluster."""

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
    # Tasks that run, and the running tasks that this process is connected to.
    self.running, self.known = set(_TASKS), set(_TASKS)
    # How often each task was started, and the number that this process knows.
    self.starts = dict.fromkeys(_TASKS, 1)
    self.seen = dict(self.starts)
    cluster = mock.create_autospec(config_lib.ClusterConfig, instance=True)
    cluster.jobs = {
      job: [f'{job}-{i}:1' for i in range(2)] for job in ('ps', 'worker')
    }
    # Tasks that restart during a connection attempt, and the argument of each
    # attempt: the tasks that need new connections.
    self.die_during_connect = ()
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

  def test_unreachable_server_is_named_when_taking_the_lease(self):
    lease = mock.Mock()
    lease.take.side_effect = tf.errors.UnavailableError(None, None, 'gone')
    with self.assertRaisesRegex(
      errors.ParameterServerUnavailableError, 'ps 0 at ps-0:1'
    ):
      self.liveness.hold_lease(lease, lambda error: None)

  def test_lease_watch_continues_after_a_read_error(self):
    lease, taken = mock.Mock(), queue.SimpleQueue()
    error = errors.TakenOverError('another chief')
    lease.check.side_effect = [ValueError('incomplete record'), error]
    with (
      mock.patch.object(connection, '_LEASE_SECONDS', 0.01),
      self.assertLogs(level='WARNING') as logs,
    ):
      self.liveness.hold_lease(lease, taken.put)
      self.assertIs(taken.get(timeout=60), error)
    self.assertIn('ValueError: incomplete record', logs.output[0])

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
    self.restart(*self.die_during_connect)
    self.known = set(self.running)

  def restart(self, *tasks):
    self.known -= set(tasks)
    for task in tasks:
      self.starts[task] += 1

  def test_restarted_server_is_dead_until_all_tasks_reconnect(
    self,
  ):
    """Reconnecting a worker also connects to the server, which has lost its state."""
    self.restart(('worker', 1), ('ps', 1))
    self.assertTrue(self.liveness.rejoin(1))
    error = self.liveness.server_error()
    self.assertEqual((error.server, error.address), (1, 'ps-1:1'))
    self.assertIn('ps 1 at ps-1:1', str(error))
    self.liveness.wait_for_all(10.0)
    self.assertIsNone(self.liveness.server_error())

  def test_tasks_that_die_during_a_reconnect_stay_dead_until_reconnected(
    self,
  ):
    self.restart(('worker', 1))
    self.die_during_connect = ('ps', 0), ('worker', 0)
    # This process still has the devices of the old tasks.
    self.assertFalse(self.liveness.rejoin(1))
    self.die_during_connect = ()
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

  def test_failed_reconnect_is_repeated_for_tasks_that_restarted(self):
    self.restart(('worker', 1))
    self.die_during_connect = (('ps', 0),)

    def fail(anew):
      self.connect(anew)
      raise tf.errors.UnavailableError(None, None, 'gone')

    with (
      mock.patch.object(_tf_internal, 'connect_again', fail),
      self.assertRaises(tf.errors.UnavailableError),
    ):
      self.liveness.rejoin(1)
    self.die_during_connect = ()
    self.assertTrue(self.liveness.rejoin(1))
    self.assertEqual(self.anew, [set(), {('ps', 0)}])

  def test_disconnected_server_is_dead_after_a_reconnect(self):
    self.restart(('worker', 1))
    with mock.patch.object(
      self.liveness._keepalive, 'is_disconnected', lambda t: t == ('ps', 1)
    ):
      self.assertTrue(self.liveness.rejoin(1))
    self.assertEqual(self.liveness.server_error().server, 1)

  def test_task_that_dies_during_a_reconnect_is_reconnected(self):
    self.die_during_connect = (('ps', 1),)
    connect = self.connect

    def connect_once(anew):
      connect(anew)
      self.die_during_connect = ()

    with mock.patch.object(_tf_internal, 'connect_again', connect_once):
      self.liveness.wait_for_all(10.0)
    self.assertEqual(self.anew, [set(), {('ps', 1)}])
    self.assertIsNone(self.liveness.server_error())


class LeaseTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # Without a server, the file is in the memory of this process.
    self.enter_context(
      mock.patch.multiple(
        connection,
        _SERVER='/device:CPU:0',
        _FILE=f'ram://lease_test/chiefs/{self.id()}',
      )
    )
    self.other = connection.Lease()
    self.other._record |= {'process': 'other', 'pids': ''}

  def test_older_chief_that_leaves_keeps_the_lease_of_the_newer_one(self):
    mine = connection.Lease()
    self.other.take()
    with mock.patch.object(connection, '_LEAVE_SECONDS', 0.0):
      mine.take()
    self.other.leave()
    before = connection._read()
    mine.check()
    self.assertEqual(connection._read(), before)
    self.assertEqual(connection._newest(before), mine._record)

  def test_take_waits_for_an_older_chief_that_returned(self):
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

  def test_check_raises_on_the_older_chief(self):
    mine = connection.Lease()
    mine.take()
    self.other._add(self.other._record)
    with self.assertRaisesRegex(errors.TakenOverError, 'taken over the'):
      mine.check()
    self.other.leave()
    mine.check()  # No other chief has the servers.
    self.assertEqual(connection._newest(connection._read()), mine._record)


if __name__ == '__main__':
  absltest.main()
