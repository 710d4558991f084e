"""Buckets: every tensor once, one dtype, bounded, ready in order."""

import itertools

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies.collectives.bucketing import plan_buckets

TENSORS = st.lists(
  st.tuples(st.integers(0, 40), st.sampled_from(['float32', 'float16'])),
  max_size=30,
)


class PlanBucketsTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None)
  @hypothesis.given(TENSORS, st.integers(1, 60))
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
