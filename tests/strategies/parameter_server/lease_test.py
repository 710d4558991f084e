"""Which of several chiefs the records on server 0 name."""

from unittest import mock

import tensorflow as tf

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import connection

_FILE = 'ram://lease_test/chiefs'


class LeaseTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # There is no server: the file is in the memory of this process.
    for name, value in (
      ('_SERVER', '/device:CPU:0'),
      ('_FILE', f'{_FILE}/{self.id()}'),
    ):
      patch = mock.patch.object(connection, name, value)
      patch.start()
      self.addCleanup(patch.stop)
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
  tf.test.main()
