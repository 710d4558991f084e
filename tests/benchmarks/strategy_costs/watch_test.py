"""The clock runs while steps do, and at no other time."""

import socket
from unittest import mock

from absl.testing import absltest

from benchmarks.strategy_costs import watch as watch_lib


class _Machine:
  """A clock and a loopback that move when they are told."""

  def __init__(self, test):
    self.seconds, self.sent = 1000.0, 10**9
    self.is_counting = True
    for target, name, value in (
      (watch_lib.time, 'perf_counter', lambda: self.seconds),
      (watch_lib, 'loopback_bytes', self._loopback),
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
    self.losses = iter([2.0, 1.0, 0.5, 0.25, 0.2, 0.1])

  def _join(self):
    """Steps on the way take a second more."""
    self.joins += 1
    self.machine.work(1.0, 1000)

  def _evaluate(self):
    self.machine.work(50.0, 10**6)
    return next(self.losses)

  def _fit(self, evaluate, evaluate_every):
    """Two epochs of three steps, whose last has fewer rows."""
    rows = (64, 64, 32)
    watch = watch_lib.Watch(
      3, rows.__getitem__, self._join, evaluate, evaluate_every
    )
    watch.on_train_begin()
    for epoch in range(2):
      watch.on_epoch_begin(epoch)
      for step in range(3):
        self.machine.work(2.0, 100)
        watch.on_train_batch_end(step)
      self.machine.work(70.0, 10**7)  # Validation.
    return watch

  def test_without_test_losses(self):
    watch = self._fit(None, 0)
    # Three steps of two seconds, and the second that the last of them take.
    expected = {'seconds': 7.0, 'loopback_bytes': 1300, 'rows': 160}
    self.assertEqual(watch.epochs, [expected, expected])
    self.assertEqual(watch.examples_per_second, 160 / 7)
    self.assertEmpty(watch.curve)
    # Once before each epoch, so that nothing is on the way, and once after it.
    self.assertEqual(self.joins, 4)

  def test_clock_pauses_for_test_losses(self):
    watch = self._fit(self._evaluate, 2)
    # Steps 2 and 4 are evaluated within an epoch; step 6 ends one, as 3 does.
    self.assertEqual(
      watch.curve,
      [(0.0, 2.0), (5.0, 1.0), (8.0, 0.5), (11.0, 0.25), (16.0, 0.2)],
    )
    self.assertEqual([e['seconds'] for e in watch.epochs], [8.0, 8.0])
    self.assertEqual([e['loopback_bytes'] for e in watch.epochs], [2300, 2300])

  def test_loopback_that_is_not_counted(self):
    self.machine.is_counting = False
    watch = self._fit(None, 0)
    self.assertEqual([e['loopback_bytes'] for e in watch.epochs], [None, None])
    self.assertEqual([e['seconds'] for e in watch.epochs], [7.0, 7.0])

  def test_no_epoch_has_no_speed(self):
    watch = watch_lib.Watch(3, None, None)
    self.assertIsNone(watch.examples_per_second)


class LoopbackTest(absltest.TestCase):
  def test_counts_what_this_machine_sends_to_itself(self):
    before = watch_lib.loopback_bytes()
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
    self.assertGreaterEqual(watch_lib.loopback_bytes() - before, 50_000)


if __name__ == '__main__':
  absltest.main()
