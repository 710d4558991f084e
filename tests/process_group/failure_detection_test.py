from absl.testing import absltest, parameterized

from tf_strategies.process_group import failure_detection, state

_MEMBERS = [state.Member(r, 10 + r, f'host-{r}:1') for r in range(4)]


# A rank that begins `fit`, and waits for the others there.
_BEGINS = 'fit', False, ['begin of fit']


class StallTest(parameterized.TestCase):
  def _find(self, before, now):
    def all_said(waits):
      return {
        rank: {'sequence': 7, 'busy': busy, 'call': call, 'exchanges': tags}
        for rank, (call, busy, tags) in enumerate(waits)
      }

    return failure_detection.stall(
      _MEMBERS[:2], all_said(before), all_said(now)
    )

  def test_ranks_may_go_on(self):
    fit, evaluate = ('fit', True, []), ('evaluate', False, ['a'])
    for before, now in (
      ([fit, fit], [fit, fit]),  # In one method.
      ([fit, evaluate], [fit, ('evaluate', False, ['b'])]),  # It went on.
      ([fit, ('evaluate', False, [])],) * 2,  # It computes.
      ([fit, ('', False, ['a'])],) * 2,  # It is in no method.
      ([_BEGINS, _BEGINS],) * 2,
    ):
      self.assertIsNone(self._find(before, now))
    self.assertIsNone(failure_detection.stall(_MEMBERS, {}, {}))


class HeartbeatMonitorTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.monitor = failure_detection.HeartbeatMonitor([1, 2], 20.0, 100.0)

  def test_who_fell_silent_first_comes_first(self):
    monitor = failure_detection.HeartbeatMonitor([1, 2, 3, 4], 20.0, 100.0)
    for rank, silent_from in ((4, 100.5), (2, 101.0), (3, 102.5), (1, 103.0)):
      monitor.heard(rank, silent_from)
    self.assertEmpty(monitor.overdue(105.0))
    self.assertEqual(list(monitor.overdue(111.0)), [])
    self.assertEqual(list(monitor.overdue(122.0)), [4, 2])
    # A pause of this process makes them equal, but for their order.
    self.assertEmpty(monitor.overdue(1000.0))
    for now in range(1001, 1021):
      monitor.overdue(now)
    self.assertEqual(list(monitor.overdue(1021.0)), [4, 2, 3, 1])

  def test_knows_that_this_process_has_just_stood_still(self):
    self.monitor.overdue(101.0)
    self.assertEqual(self.monitor.own_pause(121.0), 0.0)
    # Before and after the heartbeat goes on, for as long as others need to tell.
    self.assertEqual(self.monitor.own_pause(130.0), 29.0)
    self.monitor.overdue(131.0)
    self.assertEqual(self.monitor.own_pause(140.0), 30.0)
    self.assertEqual(self.monitor.own_pause(151.0), 0.0)


if __name__ == '__main__':
  absltest.main()
