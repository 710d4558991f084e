"""The clock runs while steps do, and at no other time."""

import socket
from unittest import mock

from absl.testing import absltest

from benchmarks.strategy_costs import task


class _Machine:
  """A clock and a loopback that move when they are told."""

  def __init__(self, test):
    self.seconds, self.sent = 1000.0, 10**9
    self.is_counting = True
    for target, name, value in (
      (task.time, 'perf_counter', lambda: self.seconds),
      (task, 'loopback_bytes', self._loopback),
    ):
      patch = mock.patch.object(target, name, value)
      patch.start()
      test.addCleanup(patch.stop)

  def _loopback(self):
    return self.sent if self.is_counting else None

  def work(self, seconds, sent):
    self.seconds += seconds
    self.sent += sent


class WatchTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.machine = _Machine(self)
    self.joins = 0

  def _join(self):
    """Steps on the way take a second more."""
    self.joins += 1
    self.machine.work(1.0, 1000)

  def _fit(self):
    """Two epochs of three steps, whose last has fewer rows."""
    rows = (64, 64, 32)
    watch = task.Watch(3, rows.__getitem__, self._join)
    for epoch in range(2):
      watch.on_epoch_begin(epoch)
      for step in range(3):
        self.machine.work(2.0, 100)
        watch.on_train_batch_end(step)
      self.machine.work(70.0, 10**7)  # Validation.
    return watch

  def test_epochs(self):
    watch = self._fit()
    # Three steps of two seconds, and the second that the last of them take.
    expected = {'seconds': 7.0, 'loopback_bytes': 1300, 'rows': 160}
    self.assertEqual(watch.epochs, [expected, expected])
    self.assertEqual(watch.examples_per_second, 160 / 7)
    # Once before each epoch, so that nothing is on the way, and once after it.
    self.assertEqual(self.joins, 4)

  def test_loopback_that_is_not_counted(self):
    self.machine.is_counting = False
    watch = self._fit()
    self.assertEqual([e['loopback_bytes'] for e in watch.epochs], [None, None])
    self.assertEqual([e['seconds'] for e in watch.epochs], [7.0, 7.0])

  def test_no_epoch_has_no_speed(self):
    watch = task.Watch(3, None, None)
    self.assertIsNone(watch.examples_per_second)


class LoopbackTest(absltest.TestCase):
  def test_counts_what_this_machine_sends_to_itself(self):
    before = task.loopback_bytes()
    if before is None:
      self.skipTest('this system counts no bytes of its loopback')
    with (
      socket.create_server(('127.0.0.1', 0)) as server,
      socket.create_connection(server.getsockname(), 10) as near,
    ):
      far, _ = server.accept()
      with far:
        far.settimeout(10)
        near.sendall(bytes(50_000))
        received = 0
        while received < 50_000:
          received += len(far.recv(1 << 16))
    self.assertGreaterEqual(task.loopback_bytes() - before, 50_000)


if __name__ == '__main__':
  absltest.main()
