"""Transfers, the symbolic check, completions, owners and byte counts."""

import dataclasses

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tests import tiers
from tf_strategies import errors
from tf_strategies.collectives import schedule
from tf_strategies.collectives.algorithms import naive, ring

T = schedule.Transfer


def make(world_size, num_chunks, *transfers):
  return schedule.Schedule('test', world_size, num_chunks, transfers)


class ChunkSizesTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None)
  @hypothesis.given(st.integers(0, 10**12), st.integers(1, 100))
  def test_balanced_and_complete(self, length, num_chunks):
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
    ('src', (T(0, 2, 1, 0, True),), r'src=2'),
    ('dst', (T(0, 0, -2, 0, True),), r'dst=-2'),
    ('chunk', (T(0, 0, 1, 1, True),), r'chunk=1'),
    ('round', (T(-1, 0, 1, 0, True),), r'round=-1'),
    ('self_send', (T(0, 1, 1, 0, True),), r'src=1, dst=1'),
    ('gap', (T(0, 0, 1, 0, True), T(2, 1, 0, 0, False)), 'round 1 is empty'),
    tiers.smoke(
      'contribution_twice',
      (T(0, 0, 1, 0, True), T(1, 0, 1, 0, True)),
      r'round=1, src=0.*ranks \[0\] a second',
    ),
  )
  def test_wrong_transfer_is_named(self, transfers, message):
    with self.assertRaisesRegex(errors.ScheduleError, message):
      make(2, 1, *transfers).validate()

  @pytest.mark.smoke
  def test_racing_writers(self):
    copy = T(0, 1, 2, 0, False)
    for other in (T(0, 0, 2, 0, True), T(0, 0, 2, 0, False)):
      with self.assertRaisesRegex(errors.ScheduleError, 'overwrites what'):
        make(3, 1, other, copy).validate()

  @pytest.mark.smoke
  def test_a_missing_chunk_is_named(self):
    wider = dataclasses.replace(ring.ring_all_reduce(2), num_chunks=3)
    with self.assertRaisesRegex(errors.ScheduleError, 'to chunk 2'):
      wider.validate()
    with self.assertRaisesRegex(errors.ScheduleError, 'chunk 0'):
      make(2, 1).owners()

  @pytest.mark.smoke
  def test_completions_and_owners(self):
    swap = make(2, 1, T(0, 0, 1, 0, True), T(0, 1, 0, 0, True))
    self.assertEqual(swap.completions(), {(0, 0, 0), (0, 1, 0)})
    self.assertEqual(swap.owners(), (0,))
    three = ring.ring_all_reduce(3)
    self.assertEqual(three.completions(), {(1, 0, 1), (1, 1, 2), (1, 2, 0)})
    self.assertEqual(three.owners(), (2, 0, 1))
    rooted = naive.naive_all_reduce(4)
    self.assertEqual(rooted.completions(), {(0, 0, 0)})
    self.assertEqual(rooted.owners(), (0,))

  def test_bytes(self):
    one = ring.ring_all_reduce(3)
    sizes = (100, 10, 1)
    # Chunks on link 0 -> 1: 0 and 2, then 1 and 0.
    self.assertEqual(
      one.bytes_per_link(sizes), {(0, 1): 211, (1, 2): 121, (2, 0): 112}
    )
    self.assertEqual(one.bytes_in(sizes), (112, 211, 121))
    self.assertEqual(make(2, 1).bytes_in([5]), (0, 0))


class RankOrderTest(absltest.TestCase):
  def test_sums_in_different_orders_are_rejected(self):
    transfers = (
      T(0, 1, 0, 0, True),
      T(0, 2, 0, 0, True),  # Rank 0 holds (0 + 1) + 2,
      T(0, 0, 2, 0, True),
      T(1, 2, 1, 0, True),  # rank 1 holds 1 + (0 + 2).
      T(2, 0, 2, 0, False),
    )
    with self.assertRaisesRegex(errors.ScheduleError, 'ranks 0 and 1 add up'):
      make(3, 1, *transfers).validate()

  def test_half_needs_a_chunk_for_each_rank(self):
    with self.assertRaisesRegex(errors.ScheduleError, 'a reduce-scatter half'):
      naive.naive_all_reduce(3).reduce_scatter()
    half = ring.ring_all_reduce(4).reduce_scatter()
    self.assertEqual((half.num_rounds, half.owners()), (3, (0, 1, 2, 3)))
    with self.assertRaises(errors.ScheduleError):
      half.validate()


if __name__ == '__main__':
  absltest.main()
