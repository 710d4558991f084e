"""Finding reachable tasks, with real sockets on the loopback interface."""

import socket
import threading
import time
from unittest import mock

import pytest
from absl.testing import absltest

from tests import processes
from tf_strategies import errors
from tf_strategies.cluster import reachability

_NO_SUCH_HOST = 'no-such-host.invalid:2222'


class ReachabilityTest(absltest.TestCase):
  def listen(self, port=0):
    """Returns the address of a socket that listens until the test ends."""
    listener = self.enter_context(socket.create_server(('127.0.0.1', port)))
    return f'127.0.0.1:{listener.getsockname()[1]}'

  def set_probe_seconds(self, seconds):
    patch = mock.patch.object(reachability, '_PROBE_SECONDS', seconds)
    self.enter_context(patch)

  def test_only_the_invalid_host_name_is_unreachable(self):
    self.set_probe_seconds(30)
    address = self.listen().replace('127.0.0.1', 'localhost')
    tasks = {'ps 0': address, 'ps 1': 'a..b:2222'}
    self.assertEqual(list(reachability.unreachable(tasks)), ['ps 1'])

  def test_hanging_name_server_does_not_block(self):
    self.set_probe_seconds(0.1)
    released = threading.Event()
    self.addCleanup(released.set)

    def connect(address, timeout):
      released.wait(60)
      raise OSError

    tasks = {'worker 0': 'slow:1'}
    with mock.patch.object(socket, 'create_connection', connect):
      self.assertEqual(
        reachability.unreachable(tasks),
        {'worker 0': 'no answer within 0.1 s'},
      )
      self.assertFalse(released.is_set())

  @pytest.mark.smoke
  def test_wait_returns_when_the_last_task_listens(self):
    [address] = processes.addresses(1)
    tasks = {'ps 0': self.listen(), 'worker 0': address}
    port = int(address.partition(':')[2])
    with self.assertLogs('absl', 'WARNING') as logs:
      timer = threading.Timer(1.0, self.listen, (port,))
      timer.start()
      self.addCleanup(timer.join)
      reachability.wait_for_tasks(tasks, 60, 'to train')
    self.assertFalse(reachability.unreachable(tasks))
    # One warning every few seconds, which names only the missing tasks.
    self.assertLen(logs.output, 1)
    self.assertIn(
      f'Waiting to train for worker 0 at {address} ', logs.output[0]
    )
    self.assertNotIn('ps 0', logs.output[0])

  def test_missing_tasks_are_named_at_the_deadline(self):
    [closed] = processes.addresses(1)
    tasks = {
      'ps 0': closed,
      'worker 0': self.listen(),
      'worker 1': _NO_SUCH_HOST,
    }
    start = time.monotonic()
    with self.assertRaises(errors.RendezvousError) as caught:
      reachability.wait_for_tasks(tasks, 1.5, 'to train')
    self.assertGreaterEqual(time.monotonic() - start, 1.5)
    message = str(caught.exception)
    self.assertIn(f'ps 0 at {closed} (Connection refused)', message)
    self.assertIn(f'worker 1 at {_NO_SUCH_HOST} (', message)
    self.assertNotIn('worker 0', message)
    self.assertStartsWith(message, 'Expected connections within 1.5 s')
    self.assertIn('raise deadline_seconds', message)


if __name__ == '__main__':
  absltest.main()
