from absl.testing import absltest, parameterized

from tf_strategies.process_group import failure_detection, state

_MEMBERS = [state.Member(r, 10 + r, f'host-{r}:1') for r in range(4)]


# A rank that waits for the others at the beginning of `fit`.
_BEGINS = 'fit', False, ['begin of fit']


class StallTest(parameterized.TestCase):
  def _find(self, before, now):
    def reports(waits):
      return {
        rank: {'sequence': 7, 'busy': busy, 'call': call, 'exchanges': tags}
        for rank, (call, busy, tags) in enumerate(waits)
      }

    return failure_detection.stall(_MEMBERS[:2], reports(before), reports(now))

  def test_ranks_that_may_progress_are_not_stalled(self):
    fit, evaluate = ('fit', True, []), ('evaluate', False, ['a'])
    for before, now in (
      ([fit, fit], [fit, fit]),  # Both are in `fit`.
      (
        [fit, evaluate],
        [fit, ('evaluate', False, ['b'])],
      ),  # Rank 1 progressed.
      ([fit, ('evaluate', False, [])],) * 2,  # Rank 1 computes.
      ([fit, ('', False, ['a'])],) * 2,  # Rank 1 is in no method.
      ([_BEGINS, _BEGINS],) * 2,
    ):
      self.assertIsNone(self._find(before, now))
    self.assertIsNone(failure_detection.stall(_MEMBERS, {}, {}))


class HeartbeatMonitorTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.monitor = failure_detection.HeartbeatMonitor([1, 2], 20.0, 100.0)

  def test_overdue_ranks_are_ordered_by_last_heartbeat(self):
    monitor = failure_detection.HeartbeatMonitor([1, 2, 3, 4], 20.0, 100.0)
    for rank, silent_from in ((4, 100.5), (2, 101.0), (3, 102.5), (1, 103.0)):
      monitor.heard(rank, silent_from)
    self.assertEmpty(monitor.overdue(105.0))
    self.assertEqual(list(monitor.overdue(111.0)), [])
    self.assertEqual(list(monitor.overdue(122.0)), [4, 2])
    # After a pause of this process all ranks get more time, in the same order.
    self.assertEmpty(monitor.overdue(1000.0))
    for now in range(1001, 1021):
      monitor.overdue(now)
    self.assertEqual(list(monitor.overdue(1021.0)), [4, 2, 3, 1])

  def test_own_pause_is_detected(self):
    self.monitor.overdue(101.0)
    self.assertEqual(self.monitor.own_pause(121.0), 0.0)
    # Reported until the other ranks have had time to report this process.
    self.assertEqual(self.monitor.own_pause(130.0), 29.0)
    self.monitor.overdue(131.0)
    self.assertEqual(self.monitor.own_pause(140.0), 30.0)
    self.assertEqual(self.monitor.own_pause(151.0), 0.0)


if __name__ == '__main__':
  absltest.main()
