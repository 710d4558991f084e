"""The clock runs during steps and at no other time."""

from unittest import mock

from absl.testing import absltest

from benchmarks.strategy_costs import task


class WatchTest(absltest.TestCase):
  def test_epochs(self):
    self.seconds, self.sent, self.joins = 1000.0, 10**9, 0

    def work(seconds, sent):
      self.seconds += seconds
      self.sent += sent

    def join():
      """Waits one second for the remaining steps."""
      self.joins += 1
      work(1.0, 1000)

    # Two epochs of three steps.
    watch = task.Watch(3, 160, join)
    with (
      mock.patch.object(task.time, 'perf_counter', lambda: self.seconds),
      mock.patch.object(task, 'loopback_bytes', lambda: self.sent),
    ):
      for epoch in range(2):
        watch.on_epoch_begin(epoch)
        for step in range(3):
          work(2.0, 100)
          watch.on_train_batch_end(step)
        work(70.0, 10**7)  # Validation.
    # Three steps of two seconds, and one second of waiting for the last.
    expected = {'seconds': 7.0, 'loopback_bytes': 1300, 'rows': 160}
    self.assertEqual(watch.epochs, [expected, expected])
    self.assertEqual(watch.examples_per_second, 160 / 7)
    # Before each epoch, so that no step is running, and after it.
    self.assertEqual(self.joins, 4)


if __name__ == '__main__':
  absltest.main()
