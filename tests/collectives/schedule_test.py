"""Sizes of chunks, transfers, and the symbolic check of a schedule."""

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tests import tiers
from tests.collectives import proof
from tf_strategies import errors
from tf_strategies.collectives import schedule
from tf_strategies.collectives.algorithms import naive, ring

T = schedule.Transfer


def make(world_size, num_chunks, *transfers):
  return schedule.Schedule('test', world_size, num_chunks, transfers)


class ChunkSizesTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None)
  @hypothesis.given(st.integers(0, 10**12), st.integers(1, 100))
  def test_chunks_are_balanced_and_complete(self, length, num_chunks):
    sizes = schedule.chunk_sizes(length, num_chunks)
    self.assertLen(sizes, num_chunks)
    self.assertEqual(sum(sizes), length)
    self.assertLessEqual(max(sizes) - min(sizes), 1)
    self.assertEqual(list(sizes), sorted(sizes, reverse=True))


class ScheduleTest(parameterized.TestCase):
  def test_transfers_are_sorted_and_hashable(self):
    late, early = T(1, 0, 1, 0, False), T(0, 1, 0, 0, True)
    one = make(2, 1, late, early)
    self.assertEqual(one.transfers, (early, late))
    self.assertEqual(one, make(2, 1, early, late))
    self.assertEqual(hash(one), hash(make(2, 1, early, late)))
    self.assertEqual(one.rounds(), ((early,), (late,)))

  @tiers.named_parameters(
    ('src', 'src=3', T(0, 3, 1, 0, True)),
    ('dst', 'dst=-2', T(0, 0, -2, 0, True)),
    ('chunk', 'chunk=1', T(0, 0, 1, 1, True)),
    ('round', 'round=-1', T(-1, 0, 1, 0, True)),
    ('self_send', 'src=1, dst=1', T(0, 1, 1, 0, True)),
    ('gap', 'round 1 is empty', T(0, 0, 1, 0, True), T(2, 1, 0, 0, False)),
    tiers.smoke(
      *('contribution_twice', r'round=1, src=0.*ranks \[0\] a second'),
      *(T(0, 0, 1, 0, True), T(1, 0, 1, 0, True)),
    ),
    ('missing', 'rank 0 lacks .* to chunk 0', T(0, 0, 1, 0, True)),
    (
      *('racing_writers', 'overwrites other writes'),
      *(T(0, 0, 2, 0, True), T(0, 1, 2, 0, False)),
    ),
    (
      *('racing_copies', 'overwrites other writes'),
      *(T(0, 0, 2, 0, False), T(0, 1, 2, 0, False)),
    ),
    (
      *('other_order', 'ranks 0 and 1 add up'),
      *(T(0, 1, 0, 0, True), T(0, 2, 0, 0, True)),  # Rank 0 has (0 + 1) + 2,
      *(T(0, 0, 2, 0, True), T(1, 2, 1, 0, True)),  # rank 1 has 1 + (0 + 2).
      T(2, 0, 2, 0, False),
    ),
  )
  def test_invalid_schedule_is_refused(self, message, *transfers):
    with self.assertRaisesRegex(proof.WrongScheduleError, message):
      proof.validate(make(3, 1, *transfers))

  def test_owner_is_the_lowest_rank_that_finishes_last(self):
    swap = make(2, 1, T(0, 0, 1, 0, True), T(0, 1, 0, 0, True))
    self.assertEqual(swap.owners(), (0,))

  def test_reduce_scatter_half_needs_a_chunk_for_each_rank(self):
    with self.assertRaisesRegex(errors.ScheduleError, 'a reduce-scatter half'):
      naive.naive_all_reduce(3).reduce_scatter()
    with self.assertRaises(proof.WrongScheduleError):
      proof.validate(ring.ring_all_reduce(4).reduce_scatter())


if __name__ == '__main__':
  absltest.main()
