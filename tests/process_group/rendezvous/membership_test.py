from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.process_group import options
from tf_strategies.process_group.rendezvous import membership, quorum

_ADDRESSES = {0: 'a:1', 1: 'b:1', 3: 'c:1'}


def _make(task, addresses=_ADDRESSES, **settings):
  made = membership.MembershipTable(
    addresses, task, f'life {task}', options.GroupOptions(**settings)
  )
  made.start(10 * task)
  return made


def _meet(made, *others, now=0.0):
  for other in others:
    made.heard(other.hello(now), now, reached=True)


def _proposed(made, now):
  """Returns the tasks of the proposed group."""
  seats = made.proposal(now)
  return None if seats is None else [seat.task for seat in seats]


class ProposalTest(parameterized.TestCase):
  def test_group_has_at_most_max_workers(self):
    first, second, third = (
      _make(task, max_workers=2, min_workers=1) for task in _ADDRESSES
    )
    _meet(first, second, third)
    self.assertEqual(_proposed(first, 0.0), [0, 1])

  def test_no_group_is_proposed_while_one_is_running(self):
    first = _make(0, min_workers=2, window_seconds=0)
    second, third = _make(1), _make(3)
    third.formed(4, {3: 'life 3'})
    _meet(first, second, third)
    self.assertIsNone(first.proposal(0.0))
    self.assertIn('task 3 at c:1 (it runs in a group', first.missing(0.0))
    self.assertEqual(first.next_generation(), 5)


def _formed(*members, generation=1):
  """Records a last group of all `members`, and starts a new search."""
  seated = {made.task: made.incarnation for made in members}
  for made in members:
    made.formed(generation, seated)
  for made in members:
    made.start(7)


class MajorityTest(parameterized.TestCase):
  """In a partitioned network, only one side continues."""

  def make(self, count, **settings):
    addresses = {task: f'host:{task}' for task in range(count)}
    settings = {'min_workers': 'majority', 'window_seconds': 0, **settings}
    return [_make(task, addresses, **settings) for task in range(count)]

  def test_only_the_larger_side_continues(self):
    first, second, third = self.make(3)
    _formed(first, second, third)
    _meet(second, third)
    # The first worker may still answer.
    self.assertIsNone(second.proposal(0.0))
    now = membership.ANSWER_SECONDS + 0.1
    self.assertEqual(_proposed(second, now), [1, 2])
    self.assertIsNone(first.proposal(0.0))
    with self.assertRaisesRegex(errors.RendezvousError, 'majority of its last'):
      raise first.timeout_error(0.0, 5)

  def test_last_worker_continues_only_if_all_others_are_dead(self):
    first, second, third = self.make(3, window_seconds=5)
    _formed(first, second, third)
    third.lost(0, 'nobody listens there', is_gone=True)
    third.lost(1, 'it fell silent')
    self.assertIsNone(third.proposal(0.0))
    third.lost(1, 'nobody listens there', is_gone=True)
    # At once: there is no other worker to wait for.
    self.assertEqual(_proposed(third, 0.0), [2])

  def test_new_worker_joins_a_minority(self):
    """Forms a group of two workers out of five. One was the whole last group."""
    first, second, *_ = self.make(5)
    second.formed(4, {1: second.incarnation})
    second.start(7)
    first.start(0, may_be_alone=False)
    _meet(first, second)
    _meet(second, first)
    now = membership.ANSWER_SECONDS + 0.1
    seats = first.proposal(now)
    self.assertEqual([seat.task for seat in seats], [0, 1])
    self.assertIsNone(second.proposal(now))
    self.assertEqual(second.objection(5, seats), '')

  def test_member_of_a_newer_group_declines(self):
    first, second, third = self.make(3)
    _formed(first, second, third)
    # The second and third formed a group without the first.
    third.formed(2, {1: 'life 1', 2: 'life 2'})
    third.start(9)
    _meet(first, third)
    _meet(third, first)
    seats = first.proposal(0.0)
    self.assertEqual([seat.task for seat in seats], [0, 2])
    self.assertIn('majority', third.objection(3, seats))

  def test_follower_trusts_the_leader_about_dead_workers(self):
    leader, follower, *_ = workers = self.make(5)
    _formed(*workers)
    for task in (2, 3, 4):
      leader.lost(task, 'nobody listens there', is_gone=True)
    _meet(leader, follower)
    seats = leader.proposal(0.0)
    # The follower itself knows only about the leader.
    self.assertIn('majority', follower.objection(2, seats))
    self.assertEqual(follower.objection(2, seats, leader.gone()), '')

  def test_closed_group_accepts_only_its_members(self):
    first, second, third = self.make(3)
    _formed(first, second)
    first.start(7, is_closed=True)
    _meet(first, second, third)
    self.assertEqual(_proposed(first, 0.0), [0, 1])


class RivalGroupTest(parameterized.TestCase):
  """Two groups of one job, which a small `min_workers` allows."""

  def test_outdated_group_is_not_a_rival(self):
    first, second, third = (_make(t, min_workers=1) for t in _ADDRESSES)
    _formed(first, second, third)
    third.formed(1, {0: 'life 0', 1: 'life 1', 3: 'life 3'})
    first.formed(2, {0: 'life 0', 1: 'life 1'})
    _meet(first, third)
    self.assertIsNone(first.rival_group(0.0))


class CutTest(parameterized.TestCase):
  @parameterized.parameters(
    ([], [0, 1, 2, 3]),
    ([(3, 0)], [0, 1, 2]),
    ([(2, 1), (3, 1)], [0, 2, 3]),  # Leaves out one task, not two.
    ([(2, 1), (3, 2), (3, 1)], [0, 1]),
  )
  def test_fewest_tasks_are_left_out(self, pairs, expected):
    self.assertEqual(quorum.leave_out([0, 1, 2, 3], pairs, leader=0), expected)

  def make(self, life='life 1', **settings):
    """Returns three workers. The third cannot connect to the second."""
    first, second, third = (_make(task, **settings) for task in _ADDRESSES)
    third.note_cut(1, life, 'it does not answer', 0.0)
    _meet(first, second, third)
    return first, second, third

  def test_required_pair_tries_to_connect_again(self):
    first, *others = self.make()
    self.assertIsNone(first.proposal(1.0))
    self.assertIn(
      'Task 3 at c:1 cannot connect to task 1 at b:1 (it does not answer)',
      str(first.timeout_error(1.0, 5)),
    )
    later = quorum.RETRY_SECONDS + 1
    _meet(first, *others, now=later)
    self.assertEqual(_proposed(first, later), [0, 1, 3])

  def test_cut_to_a_restarted_task_is_ignored(self):
    first, *_ = self.make('before')
    self.assertEqual(_proposed(first, 1.0), [0, 1, 3])

  def test_next_proposal_waits_for_all_workers_to_report(self):
    first, second, third = (_make(task) for task in _ADDRESSES)
    _meet(first, second, third)
    first.failed_at = 1.0
    _meet(first, second, now=1.1)
    self.assertIsNone(first.proposal(1.1))
    _meet(first, third, now=1.2)
    self.assertEqual(_proposed(first, 1.2), [0, 1, 3])

  def test_unreachable_worker_does_not_join(self):
    first, _, third = self.make()
    first.formed(1, {0: 'life 0', 1: 'life 1'})
    self.assertEqual(first.joiners(1.0), ())
    later = quorum.CUT_SECONDS + 1
    _meet(first, third, now=later)
    self.assertEqual(first.joiners(later), (3,))


class ObjectionTest(absltest.TestCase):
  def test_declined_proposal_has_a_reason(self):
    first, second = _make(0, min_workers=2, window_seconds=0), _make(1)
    _meet(first, second)
    seats = first.proposal(0.0)
    self.assertEqual([s.progress for s in seats], [0, 10])
    self.assertEqual(second.objection(1, seats), '')
    self.assertIn('is over', second.objection(0, seats))
    old = [seats[0], seats[1]._replace(incarnation='before')]
    self.assertIn('incarnation', second.objection(1, old))
    second.formed(1, {0: 'life 0', 1: 'life 1'})
    self.assertEqual(second.objection(2, seats), 'it is running')


class RefusalTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      {'addresses': [[0, 'a:1'], [1, 'x:9'], [3, 'c:1']]},
      errors.ClusterConfigError,
      'life 0.*life 1.*task 1 is at b:1 here and at x:9',
    ),
    (
      {'addresses': [[0, 'a:1'], [1, 'b:1']]},
      errors.ClusterConfigError,
      'life 0.*life 1.*task 3 is at c:1 here and at no address',
    ),
    ({'task': 0}, errors.ClusterConfigError, 'claim to be task'),
    ({'version': '9.9'}, errors.RendezvousError, r'0\..*got 9\.9'),
  )
  def test_mismatched_worker_is_refused(self, changes, error, words):
    with self.assertRaisesRegex(error, words):
      _make(0).heard({**_make(1).hello(), **changes}, 0.0, reached=True)

  def test_refusal_of_another_worker_ends_the_wait(self):
    message = {**_make(1).hello(), 'refusal': 'the maps differ'}
    first = _make(0)
    with self.assertRaisesRegex(errors.RendezvousError, 'the maps differ'):
      first.heard(message, 0.0, reached=True)
    # Ignored while a group is running.
    first.formed(1, {0: 'life 0', 1: 'life 1'})
    first.heard(message, 0.0, reached=False)

  def test_only_the_process_at_the_address_replaces_a_task(self):
    first, old = _make(0), _make(1)
    new = {**old.hello(), 'incarnation': 'a second life'}
    _meet(first, old)
    first.heard(new, 1.0, reached=False)
    self.assertEqual(first.views[1].incarnation, 'life 1')
    first.heard(new, 1.1, reached=True)
    self.assertEqual(first.views[1].incarnation, 'a second life')


if __name__ == '__main__':
  absltest.main()
