"""Layouts hold each tensor once, are balanced, and cut few tensors."""

import collections
import itertools
import math

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies.collectives.layout import plan_layout

TENSORS = st.lists(
  st.tuples(
    st.one_of(st.integers(0, 40), st.integers(0, 5000)),
    st.sampled_from([1, 2, 4, 8]),
  ),
  max_size=25,
)
CHUNKS = st.integers(1, 9)
CUT_ABOVE = st.sampled_from([0, 100, 2000, math.inf])


def plan(tensors, num_chunks, cut_above):
  """Returns the pieces and the bytes in each chunk."""
  num_elements = [n for n, _ in tensors]
  itemsizes = [i for _, i in tensors]
  pieces = plan_layout(num_elements, itemsizes, num_chunks, cut_above)
  loads = [0] * num_chunks
  for piece in pieces:
    loads[piece.chunk] += (piece.stop - piece.start) * itemsizes[piece.tensor]
  return pieces, loads


def by_tensor(pieces):
  grouped = collections.defaultdict(list)
  for piece in pieces:
    grouped[piece.tensor].append(piece)
  return grouped


class PlanLayoutTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None)
  @hypothesis.given(TENSORS, CHUNKS, CUT_ABOVE)
  @pytest.mark.smoke
  def test_covers_every_element_once(self, tensors, num_chunks, cut_above):
    pieces, loads = plan(tensors, num_chunks, cut_above)
    grouped = by_tensor(pieces)
    self.assertEqual(list(grouped), list(range(len(tensors))))
    for tensor, (length, _) in enumerate(tensors):
      mine = grouped[tensor]
      self.assertEqual(mine[0].start, 0)
      self.assertEqual(mine[-1].stop, length)
      for one, other in itertools.pairwise(mine):
        self.assertEqual(one.stop, other.start)
      if len(mine) > 1:
        for piece in mine:
          self.assertLess(piece.start, piece.stop)
          self.assertEqual(piece.start % 16, 0)
        self.assertGreaterEqual(mine[-1].stop - mine[-1].start, 16)
        chunks = [piece.chunk for piece in mine]
        self.assertLen(set(chunks), len(chunks))
    self.assertLen(loads, num_chunks)
    self.assertEqual(sum(loads), sum(n * i for n, i in tensors))

  @hypothesis.settings(deadline=None)
  @hypothesis.given(TENSORS, CHUNKS, CUT_ABOVE)
  def test_few_tensors_are_cut_and_the_load_is_bounded(
    self, tensors, num_chunks, cut_above
  ):
    pieces, loads = plan(tensors, num_chunks, cut_above)
    total = sum(n * i for n, i in tensors)
    cut = [
      tensor for tensor, mine in by_tensor(pieces).items() if len(mine) > 1
    ]
    self.assertLess(len(cut), num_chunks)
    sizes = [n * i for n, i in tensors]
    self.assertTrue(all(sizes[tensor] > cut_above for tensor in cut))
    # At each end of a chunk, 8 elements for rounding and less than 8 for a small rest.
    slack = 32 * max((i for _, i in tensors), default=0)
    whole = max((size for size in sizes if size <= cut_above), default=0)
    self.assertLessEqual(max(loads), total / num_chunks + whole + slack)


if __name__ == '__main__':
  absltest.main()
