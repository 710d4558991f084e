"""Buckets: every tensor once, one dtype, bounded, ready in order."""

import itertools

import hypothesis
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies.collectives.bucketing import Bucket, plan_buckets

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
    indices = [index for bucket in buckets for index in bucket.indices]
    self.assertCountEqual(indices, range(len(tensors)))
    for bucket in buckets:
      self.assertEqual({dtypes[i] for i in bucket.indices}, {bucket.dtype})
      self.assertEqual(sum(sizes[i] for i in bucket.indices), bucket.num_bytes)
      if len(bucket.indices) > 1:
        self.assertLessEqual(bucket.num_bytes, bucket_bytes)
      self.assertEqual(
        list(bucket.indices), sorted(bucket.indices, reverse=True)
      )
    last = [bucket.indices[-1] for bucket in buckets]
    self.assertEqual(last, sorted(last, reverse=True))
    for dtype in set(dtypes):
      # Greedy: no two neighbours of one dtype would fit into one bucket.
      same = [bucket for bucket in buckets if bucket.dtype == dtype]
      for one, other in itertools.pairwise(same):
        self.assertGreater(
          one.num_bytes + sizes[other.indices[0]], bucket_bytes
        )

  def test_last_layers_first(self):
    self.assertEqual(
      plan_buckets([10, 20, 30, 40], ['float32'] * 4, 70),
      (Bucket((3, 2), 'float32', 70), Bucket((1, 0), 'float32', 30)),
    )

  def test_dtypes_do_not_mix_nor_close_each_other(self):
    buckets = plan_buckets([4] * 5, ['f', 'h', 'f', 'h', 'f'], 8)
    self.assertEqual(
      buckets,
      (Bucket((4, 2), 'f', 8), Bucket((3, 1), 'h', 8), Bucket((0,), 'f', 4)),
    )

  def test_larger_than_a_bucket(self):
    self.assertEqual(
      plan_buckets([0, 99, 1], ['f'] * 3, 10),
      (Bucket((2,), 'f', 1), Bucket((1,), 'f', 99), Bucket((0,), 'f', 0)),
    )

  def test_nothing_to_plan(self):
    self.assertEqual(plan_buckets([], [], 10), ())

  def test_dtype_objects(self):
    (bucket,) = plan_buckets([4], [np.dtype('float32')], 10)
    self.assertEqual(bucket.dtype, 'float32')


if __name__ == '__main__':
  absltest.main()
