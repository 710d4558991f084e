import dataclasses
import json

from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.process_group import failure_detection, state

_MEMBERS = [state.Member(r, 10 + r, f'host-{r}:1') for r in range(4)]


def _said(sequence, recent, busy=True, call='', exchanges=()):
  return {
    'sequence': sequence,
    'busy': busy,
    'recent': {str(k): v for k, v in recent.items()},
    'call': call,
    'exchanges': exchanges,
  }


_TIMEOUT = {
  'text': "all_reduce(sum) 'w' of float32[9]",
  'sequence': 7,
  'name': 'w',
  'tag': '',
  'seconds': 600.0,
  'ranks': [3],
}
_MISMATCH = {
  'reporter': 2,
  'ranks': [1],
  'seconds': None,
  'sequence': 7,
  'name': 'w',
  'text': 'this',
}


# A rank that begins `fit`, and waits for the others there.
_BEGINS = 'fit', False, ['begin of fit']


class StallTest(parameterized.TestCase):
  def _find(self, before, now):
    def all_said(waits):
      return {
        rank: _said(7, {}, busy, call, tags)
        for rank, (call, busy, tags) in enumerate(waits)
      }

    return failure_detection.stall(
      _MEMBERS[:2], all_said(before), all_said(now)
    )

  @parameterized.parameters(
    (
      ('fit', True, []),
      ('evaluate', False, ['a']),
      'in fit, rank 1 in evaluate',
    ),
    (('fit', True, []), _BEGINS, 'in fit, rank 1 in the begin of fit'),
    (('', True, []), _BEGINS, 'in no method, rank 1 in the begin of fit'),
  )
  def test_names_the_methods_in_which_ranks_wait(self, first, second, words):
    report = self._find([first, second], [first, second])
    self.assertIsInstance(report.exception(), errors.CollectiveMismatchError)
    self.assertIn(f'rank 0 {words}', report.message)
    self.assertEqual(report.ranks, (1,))

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


class DiagnoseTest(absltest.TestCase):
  def test_late_ranks_are_those_before_the_collective(self):
    said = {
      0: _said(7, {7: 'w'}),
      1: _said(6, {6: "barrier 'b'"}, busy=False, call='fit'),
      2: _said(7, {7: 'w'}),
    }
    error = failure_detection.diagnose(_MEMBERS, _TIMEOUT, said).exception()
    self.assertIsInstance(error, errors.CollectiveTimeoutError)
    self.assertEqual((error.rank, error.tensor, error.step), (1, 'w', 7))
    self.assertIn(
      'rank 1 (task 11 at host-1:1) has not arrived: it was last in barrier '
      "'b' (sequence 6) in fit",
      str(error),
    )
    self.assertIn('rank 3 (task 13 at host-3:1) does not say', str(error))

  def test_ranks_that_differ_from_the_lowest(self):
    said = {
      0: _said(7, {6: 'x', 7: 'reduce a'}),
      1: _said(8, {7: 'reduce b', 8: 'y'}, call='evaluate'),
      2: _said(7, {7: 'reduce a'}),
      3: _said(6, {6: 'x'}),
    }
    error = failure_detection.diagnose(_MEMBERS, _MISMATCH, said).exception()
    self.assertIsInstance(error, errors.CollectiveMismatchError)
    self.assertEqual((error.ranks, error.step), ((1,), 7))
    self.assertIn('rank 0 (task 10 at host-0:1) does reduce a;', str(error))
    self.assertIn(
      'rank 1 (task 11 at host-1:1) does reduce b in evaluate', str(error)
    )
    self.assertNotIn('rank 3', str(error))


class HeartbeatMonitorTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.monitor = failure_detection.HeartbeatMonitor([1, 2], 20.0, 100.0)

  def test_silent_rank_is_overdue(self):
    for now in range(101, 121):
      self.monitor.heard(2, now)
      self.assertEmpty(self.monitor.overdue(now))
    self.assertEqual(self.monitor.overdue(121.0), {1: 21.0})

  def test_who_fell_silent_first_comes_first(self):
    monitor = failure_detection.HeartbeatMonitor([1, 2, 3, 4], 20.0, 100.0)
    for rank, silent_from in ((1, 103.0), (2, 101.0), (3, 102.5), (4, 100.5)):
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


class FailureReportTest(absltest.TestCase):
  def test_it_travels_and_first_counts(self):
    shared = state.GroupState(_MEMBERS, 2, 1)
    seen = []
    shared.on_failure(lambda: seen.append('called'))
    shared.begin("all_reduce(sum) 'w' of int32[5]", 'w')
    report = shared.lost(1, 'died')
    message = json.loads(json.dumps(dataclasses.asdict(report)))
    heard = state.FailureReport(**message).exception()
    self.assertEqual(vars(heard), vars(report.exception()))
    self.assertEqual(str(heard), report.message)
    self.assertTrue(shared.fail(report))
    self.assertFalse(shared.fail(shared.lost(3, 'died')))
    shared.on_failure(lambda: seen.append('late'))
    self.assertEqual(seen, ['called', 'late'])
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError,
      r"^Rank 1 \(task 11 at host-1:1\) died during all_reduce\(sum\) 'w' of "
      r'int32\[5\] \(sequence 1\)\.',
    ) as raised:
      shared.check()
    error = raised.exception
    self.assertEqual((error.rank, error.address), (1, 'host-1:1'))
    self.assertEqual((error.tensor, error.step), ('w', 1))


if __name__ == '__main__':
  absltest.main()
