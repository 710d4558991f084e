"""Layouts and buckets: each tensor once, balanced, bounded, without needless cuts."""

import collections
import itertools

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies.collectives.bucketing import plan_buckets
from tf_strategies.collectives.layout import plan_layout

TENSORS = st.lists(
  st.tuples(
    st.one_of(st.integers(0, 40), st.integers(0, 5000)),
    st.sampled_from([1, 2, 4, 8]),
  ),
  max_size=25,
)
CHUNKS = st.integers(1, 9)
FRACTION = st.one_of(
  st.sampled_from([0.0, 0.05, 0.125, 0.5, 1.0]), st.floats(0, 1)
)


def plan(tensors, num_chunks, split_above=None):
  """Returns the pieces, and the bytes in each chunk."""
  num_elements = [n for n, _ in tensors]
  itemsizes = [i for _, i in tensors]
  pieces = plan_layout(num_elements, itemsizes, num_chunks, split_above)
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
  @hypothesis.given(TENSORS, CHUNKS, st.one_of(st.none(), FRACTION))
  @pytest.mark.smoke
  def test_covers_every_element_once(self, tensors, num_chunks, fraction):
    pieces, loads = plan(tensors, num_chunks, fraction)
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
  @hypothesis.given(TENSORS, CHUNKS, FRACTION)
  def test_only_large_tensors_are_cut_and_the_load_is_bounded(
    self, tensors, num_chunks, fraction
  ):
    pieces, loads = plan(tensors, num_chunks, fraction)
    total = sum(n * i for n, i in tensors)
    unsplit = [0]
    slack = 0
    for tensor, mine in by_tensor(pieces).items():
      length, itemsize = tensors[tensor]
      if length * itemsize <= fraction * total:
        self.assertLen(mine, 1)
        unsplit.append(length * itemsize)
      else:
        # 16 elements of rounding, under 16 more where that saves a crumb.
        slack = max(slack, 31 * itemsize)
    self.assertLessEqual(max(loads), total / num_chunks + max(unsplit) + slack)

  def test_largest_first_onto_the_least_loaded(self):
    # In the given order the third tensor would make the loads 6 and 2.
    pieces, loads = plan([(2, 1), (2, 1), (4, 1)], 2)
    self.assertEqual([piece.chunk for piece in pieces], [1, 1, 0])
    self.assertEqual(loads, [4, 4])


BUCKETED = st.lists(
  st.tuples(st.integers(0, 40), st.sampled_from(['float32', 'float16'])),
  max_size=30,
)


class PlanBucketsTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None)
  @hypothesis.given(BUCKETED, st.integers(1, 60))
  @pytest.mark.smoke
  def test_properties(self, tensors, bucket_bytes):
    sizes = [size for size, _ in tensors]
    dtypes = [dtype for _, dtype in tensors]
    buckets = plan_buckets(sizes, dtypes, bucket_bytes)
    indices = [index for bucket in buckets for index in bucket]
    self.assertCountEqual(indices, range(len(tensors)))
    for bucket in buckets:
      self.assertLen({dtypes[i] for i in bucket}, 1)
      if len(bucket) > 1:
        self.assertLessEqual(sum(sizes[i] for i in bucket), bucket_bytes)
      self.assertEqual(list(bucket), sorted(bucket, reverse=True))
    last = [bucket[-1] for bucket in buckets]
    self.assertEqual(last, sorted(last, reverse=True))
    for dtype in set(dtypes):
      # Greedy: no two neighbours of one dtype would fit into one bucket.
      same = [bucket for bucket in buckets if dtypes[bucket[0]] == dtype]
      for one, other in itertools.pairwise(same):
        filled = sum(sizes[i] for i in one)
        self.assertGreater(filled + sizes[other[0]], bucket_bytes)


if __name__ == '__main__':
  absltest.main()
