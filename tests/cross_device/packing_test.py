"""Packing keeps every element, separates dtypes, and limits the size of buckets."""

import itertools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

from tests import tf_case, virtual_devices
from tf_strategies.cross_device import packing

virtual_devices.configure()

_DTYPES = (np.float32, np.float64, np.int32, np.int64, np.uint16)
_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
_TENSORS = st.lists(
  st.tuples(_SHAPES, st.sampled_from(_DTYPES), st.booleans()),
  min_size=1,
  max_size=12,
)
_ROWS = 3


class PackTest(tf_case.TestCase):
  @hypothesis.settings(max_examples=40)
  @hypothesis.given(
    _TENSORS, st.sampled_from([1, 16, 100, 10_000]), st.sampled_from([1, 40])
  )
  # An empty tensor must not share a bucket with a tensor that is packed alone.
  @hypothesis.example(
    [((0,), np.float32, False), ((2,), np.float32, True)], 100, 40
  )
  @hypothesis.example(
    [((2,), np.float32, True), ((0,), np.float32, False)], 100, 40
  )
  @pytest.mark.smoke
  def test_round_trip(self, described, bucket_bytes, alone_bytes):
    # All elements differ, as far as their dtype allows.
    arrays = [
      (1000 * i + np.arange(np.prod(shape, dtype=int)))
      .astype(dtype)
      .reshape(shape)
      for i, (shape, dtype, _) in enumerate(described)
    ]
    is_unknown = [unknown and shape != () for shape, _, unknown in described]
    signature = [
      tf.TensorSpec([None] * a.ndim if unknown else a.shape, a.dtype)
      for a, unknown in zip(arrays, is_unknown, strict=True)
    ]
    traced = []

    @tf.function(input_signature=[signature])
    def pack_and_unpack(tensors):
      packed = packing.pack(tensors, bucket_bytes, alone_bytes)
      traced.append(packed.members)
      return packed.unpack(packed.buckets), packed.buckets

    back, buckets = pack_and_unpack(arrays)
    [members] = traced
    for want, got in zip(arrays, back, strict=True):
      np.testing.assert_array_equal(want, got.numpy(), strict=True)
    self.assertCountEqual(
      [i for m in members for i in m], range(len(arrays)), 'each exactly once'
    )
    ready = [min(m) for m in members]
    self.assertEqual(ready, sorted(ready, reverse=True), 'last tensor first')
    for bucket, inside in zip(buckets, members, strict=True):
      bucket = bucket.numpy()
      self.assertEqual(list(inside), sorted(inside, reverse=True))
      np.testing.assert_array_equal(
        bucket, np.concatenate([arrays[i].ravel() for i in inside]), strict=True
      )
      if len(inside) > 1:
        self.assertLessEqual(bucket.nbytes, bucket_bytes)
        for i in inside:
          self.assertFalse(is_unknown[i])
          self.assertLess(arrays[i].nbytes, alone_bytes)
    # Greedy: no two neighbours of one dtype would fit into one bucket.
    for dtype in _DTYPES:
      sizes = [
        [arrays[i].nbytes for i in m]
        for m in members
        if arrays[m[0]].dtype == dtype
        and not is_unknown[m[0]]
        and arrays[m[0]].nbytes < alone_bytes
      ]
      for one, other in itertools.pairwise(sizes):
        self.assertGreater(sum(one) + other[0], bucket_bytes)


class RowsTest(tf_case.TestCase):
  """Packing matrices whose rows are the pieces of replicas."""

  @parameterized.parameters(1, 100, 1 << 20)
  def test_round_trip(self, bucket_bytes):
    random = np.random.default_rng(0)
    matrices = [
      tf.constant(random.normal(size=[_ROWS, n]), tf.float32)
      for n in (5, 1, 8, 3)
    ]
    matrices.append(tf.constant([[1], [2], [3]]))
    packed = packing.pack(matrices, bucket_bytes, num_rows=_ROWS)
    self.assertEqual(
      [b.shape.as_list() for b in packed.buckets],
      [[_ROWS * sum(lengths)] for lengths in packed.lengths],
    )
    whole = packed.unpack(packed.buckets, _ROWS)
    for before, after in zip(matrices, whole, strict=True):
      self.assertAllEqual(before, after)
    # Each row of a bucket holds the pieces of one replica.
    rows = [tf.reshape(bucket, [_ROWS, -1]) for bucket in packed.buckets]
    for place in range(_ROWS):
      own = packed.unpack([bucket[place] for bucket in rows], 1)
      for matrix, piece in zip(matrices, own, strict=True):
        self.assertAllEqual(piece[0], matrix[place])


if __name__ == '__main__':
  tf.test.main()
