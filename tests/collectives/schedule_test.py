"""Transfers, the symbolic check, completions, owners and byte counts."""

import dataclasses
import re

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

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

  @parameterized.named_parameters(
    ('src', T(0, 2, 1, 0, True)),
    ('negative_src', T(0, -1, 1, 0, True)),
    ('dst', T(0, 0, 2, 0, True)),
    ('chunk', T(0, 0, 1, 1, True)),
    ('round', T(-1, 0, 1, 0, True)),
    ('self_send', T(0, 1, 1, 0, True)),
  )
  def test_out_of_range(self, transfer):
    with self.assertRaisesRegex(errors.ScheduleError, re.escape(str(transfer))):
      make(2, 1, transfer).validate()

  @pytest.mark.smoke
  def test_contribution_added_twice_names_transfer_and_ranks(self):
    second = T(1, 0, 1, 0, True)
    with self.assertRaisesRegex(
      errors.ScheduleError, r'ranks \[0\] a second'
    ) as caught:
      make(2, 1, T(0, 0, 1, 0, True), second).validate()
    self.assertIn(str(second), str(caught.exception))

  @pytest.mark.smoke
  def test_racing_writers(self):
    copy = T(0, 1, 2, 0, False)
    for other in (T(0, 0, 2, 0, True), T(0, 0, 2, 0, False)):
      with self.assertRaisesRegex(errors.ScheduleError, 'overwrites what'):
        make(3, 1, other, copy).validate()

  @pytest.mark.smoke
  def test_a_missing_chunk_is_named(self):
    whole = ring.ring_all_reduce(2)
    wider = dataclasses.replace(whole, num_chunks=3)
    with self.assertRaisesRegex(errors.ScheduleError, 'to chunk 2'):
      wider.validate()

  def test_gap(self):
    with self.assertRaisesRegex(errors.ScheduleError, 'round 1 is empty'):
      make(2, 1, T(0, 0, 1, 0, True), T(2, 1, 0, 0, False)).validate()

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

  def test_earliest_completion_owns(self):
    late_low = make(
      3,
      1,
      T(0, 1, 0, 0, True),  # Rank 0 holds {0, 1} and needs {2} late.
      T(0, 0, 2, 0, True),
      T(1, 1, 2, 0, True),  # Rank 2 is complete in round 1.
      T(2, 2, 1, 0, False),
      T(3, 2, 0, 0, False),
    )
    self.assertEqual(late_low.validate().completions(), {(1, 2, 0)})
    self.assertEqual(late_low.owners(), (2,))

  def test_world_of_one(self):
    alone = make(1, 2).validate()
    self.assertEqual(alone.completions(), frozenset())
    self.assertEqual(alone.owners(), (0, 0))
    self.assertEqual(alone.num_rounds, 0)

  def test_owner_of_an_incomplete_chunk(self):
    with self.assertRaisesRegex(errors.ScheduleError, 'chunk 0'):
      make(2, 1).owners()

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
    t = schedule.Transfer
    transfers = (
      t(0, 1, 0, 0, True),
      t(0, 2, 0, 0, True),  # Rank 0 holds (0 + 1) + 2,
      t(0, 0, 2, 0, True),
      t(1, 2, 1, 0, True),  # rank 1 holds 1 + (0 + 2).
      t(2, 0, 2, 0, False),
    )
    two_orders = schedule.Schedule('two_orders', 3, 1, transfers)
    with self.assertRaisesRegex(errors.ScheduleError, 'ranks 0 and 1 add up'):
      two_orders.validate()
    copied = (*transfers[:3], t(1, 0, 1, 0, False), t(1, 0, 2, 0, False))
    once = schedule.Schedule('once', 3, 1, copied).validate()
    self.assertLen(once.completions(), 1)

  def test_half_needs_a_chunk_for_each_rank(self):
    with self.assertRaisesRegex(errors.ScheduleError, 'no reduce-scatter half'):
      naive.naive_all_reduce(3).reduce_scatter()
    half = ring.ring_all_reduce(4).reduce_scatter()
    self.assertEqual((half.num_rounds, half.owners()), (3, (0, 1, 2, 3)))
    with self.assertRaises(errors.ScheduleError):
      half.validate()


if __name__ == '__main__':
  absltest.main()
