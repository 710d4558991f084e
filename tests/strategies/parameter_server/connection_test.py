"""Which of several chiefs drives the servers, and how one finds out."""

import queue
from unittest import mock

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import connection


class LeaseTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # There is no server: the file is in the memory of this process.
    patch = mock.patch.multiple(
      connection,
      _SERVER='/device:CPU:0',
      _FILE=f'ram://connection_test/{self.id()}',
      _LEASE_SECONDS=0.01,
    )
    self.enter_context(patch)
    self.other = connection.Lease()
    self.other._record |= {'process': 'other', 'pids': ''}

  def liveness(self):
    cluster = mock.Mock(jobs={'ps': ['127.0.0.1:1'], 'worker': []})
    found = connection.Liveness(cluster)
    self.addCleanup(found.close)
    return found

  def test_server_that_does_not_tell_who_drives_it_is_named(self):
    liveness, lease = self.liveness(), mock.Mock()
    lease.take.side_effect = tf.errors.UnavailableError(None, None, 'gone')
    with (
      mock.patch.object(liveness, 'server_error', lambda: None),
      self.assertRaisesRegex(
        errors.ParameterServerUnavailableError, 'ps 0 at 127.0.0.1:1'
      ),
    ):
      liveness.hold_lease(lease, lambda error: None)

  def test_watch_goes_on_when_it_cannot_read_who_drives_the_servers(self):
    lease, taken = mock.Mock(), queue.SimpleQueue()
    error = errors.TakenOverError('another chief')
    lease.check.side_effect = [ValueError('half a record'), error]
    with self.assertLogs(level='WARNING') as logs:
      self.liveness().hold_lease(lease, taken.put)
      self.assertIs(taken.get(timeout=60), error)
    self.assertIn('ValueError: half a record', logs.output[0])

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

  def test_older_chief_that_was_told_goes_on_when_the_newer_one_left(self):
    mine = connection.Lease()
    mine.take()
    self.other._add(self.other._record)
    with self.assertRaisesRegex(errors.TakenOverError, 'taken over the'):
      mine.check()
    self.other.leave()
    mine.check()
    self.assertEqual(connection._newest(connection._read()), mine._record)


if __name__ == '__main__':
  tf.test.main()
