"""The double binary tree: its two trees, literal tables, bytes and rounds."""

import dataclasses

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tf_strategies import errors
from tf_strategies.collectives import (
  ALGORITHMS,
  Link,
  Topology,
  chunk_sizes,
  cost,
  simulate,
)
from tf_strategies.collectives.algorithms import double_binary_tree

BUILD = double_binary_tree.double_binary_tree_all_reduce
WORLD_SIZES = (*range(1, 18),)


def table(schedule):
  return [
    [f'{t.src}{t.dst}{"+" if t.reduce else "="}{t.chunk}' for t in transfers]
    for transfers in schedule.rounds()
  ]


def distinct_inputs(world_size, length):
  """Tells ranks and positions apart."""
  return [rank * 1000 + np.arange(length) for rank in range(world_size)]


def assert_exact_sum(schedule, length):
  inputs = distinct_inputs(schedule.world_size, length)
  for output in simulate(schedule, inputs).outputs:
    np.testing.assert_array_equal(output, np.sum(inputs, axis=0), strict=True)


def degree(position, n):
  """Neighbours of an in-order position (1 to n) in one of the trees."""
  if position % 2:
    return 1  # A leaf.
  is_root = 2 * position > n and not position & (position - 1)
  return 1 + (position < n) + (not is_root)


class DoubleBinaryTreeTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_is_found_by_name(self):
    self.assertIs(ALGORITHMS['double_binary_tree'], BUILD)

  @parameterized.parameters(*WORLD_SIZES)
  def test_is_valid_and_exact(self, n):
    schedule = BUILD(n).validate()
    self.assertTrue(schedule.adds_up_once())
    self.assertEqual(schedule.num_chunks, 2 if n > 1 else 1)
    self.assertLen(schedule.transfers, 4 * (n - 1))
    for length in (0, 1, 2, 3, 31, 97):
      assert_exact_sum(schedule, length)

  def test_of_2(self):
    self.assertEqual(table(BUILD(2)), [['01+0', '10+1'], ['01=1', '10=0']])

  def test_of_3(self):
    self.assertEqual(
      table(BUILD(3)),
      [['01+0', '02+1', '12+1', '21+0'], ['10=0', '12=0', '20=1', '21=1']],
    )

  def test_of_4(self):
    self.assertEqual(
      table(BUILD(4)),
      [
        ['01+0', '12+1', '21+0', '32+1'],
        ['13+0', '20+1'],
        ['02=1', '31=0'],
        ['10=0', '12=0', '21=1', '23=1'],
      ],
    )

  def test_of_5(self):
    self.assertEqual(
      table(BUILD(5)),
      [
        ['01+0', '12+1', '21+0', '32+1'],
        ['04+1', '13+0', '24+1', '43+0'],
        ['31=0', '34=0', '40=1', '42=1'],
        ['10=0', '12=0', '21=1', '23=1'],
      ],
    )

  @parameterized.parameters(*WORLD_SIZES, 100, 128)
  def test_inner_nodes_of_one_tree_are_leaves_of_the_other(self, n):
    transfers = BUILD(n).transfers
    inner = [
      {t.dst for t in transfers if t.reduce and t.chunk == chunk}
      for chunk in range(2)
    ]
    self.assertEmpty(inner[0] & inner[1])
    for chunk in range(2):
      children = [t.dst for t in transfers if t.reduce and t.chunk == chunk]
      self.assertLessEqual(max(map(children.count, children), default=0), 2)

  @parameterized.parameters(*WORLD_SIZES[1:])
  def test_bytes_of_each_rank(self, n):
    schedule = BUILD(n)
    for length in (0, 1, 31, 12 * n):
      sizes = halves = chunk_sizes(length, 2)
      # Rank r is at position r + 1 of the first tree, and at r of the second,
      # whose position n is rank 0. Each neighbour gets a half and sends one.
      expected = tuple(
        halves[0] * degree(rank + 1, n) + halves[1] * degree(rank or n, n)
        for rank in range(n)
      )
      self.assertEqual(schedule.bytes_out(sizes), expected)
      self.assertEqual(schedule.bytes_in(sizes), expected)
      if length == 12 * n:
        self.assertLessEqual(max(expected), 2 * length)
      moved = simulate(schedule, distinct_inputs(n, length)).bytes_per_link
      planned = schedule.bytes_per_link([8 * size for size in sizes])
      self.assertEqual(moved, planned)

  @parameterized.parameters(*WORLD_SIZES, 100, 1000)
  def test_rounds_are_logarithmic(self, n):
    expected = 2 * (n.bit_length() - 1) if n > 1 else 0
    self.assertEqual(BUILD(n).num_rounds, expected)

  def test_large_buffers_are_cheaper_in_the_model_than_by_one_tree(self):
    mesh = Topology(16, Link(1e-5, 1e-9))
    tree = cost(ALGORITHMS['tree'](16), 10**8, mesh)
    self.assertLess(cost(BUILD(16), 10**8, mesh), tree)

  @parameterized.parameters(2, 3, 4, 7)
  def test_a_lost_or_misplaced_transfer_fails(self, n):
    original = BUILD(n)
    for index, t in enumerate(original.transfers):
      for changed in (
        (),
        (dataclasses.replace(t, chunk=1 - t.chunk),),
        (dataclasses.replace(t, reduce=not t.reduce),),
      ):
        transfers = original.transfers
        mutant = dataclasses.replace(
          original,
          transfers=(*transfers[:index], *changed, *transfers[index + 1 :]),
        )
        with self.assertRaises(errors.ScheduleError):
          mutant.validate()
    lost = dataclasses.replace(original, transfers=original.transfers[1:])
    with self.assertRaises(AssertionError):
      assert_exact_sum(lost, 31)

  @pytest.mark.smoke
  def test_the_same_tree_twice_is_not_a_double_tree(self):
    """Without the shift the sums are right, but not the bytes."""
    n = 7
    single = [t for t in BUILD(n).transfers if t.chunk == 0]
    twice = dataclasses.replace(
      BUILD(n),
      transfers=(*single, *(dataclasses.replace(t, chunk=1) for t in single)),
    ).validate()
    assert_exact_sum(twice, 31)
    self.assertGreater(max(twice.bytes_out([10, 10])), 2 * 20)


if __name__ == '__main__':
  absltest.main()
