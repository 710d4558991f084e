"""Packing loses nothing, keeps kinds apart, and fills no bucket too far."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

from tests import virtual_devices
from tf_strategies.cross_device import packing

virtual_devices.configure()

_DTYPES = (np.float32, np.float64, np.int32, np.int64, np.uint16)
_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
_TENSORS = st.lists(
  st.tuples(_SHAPES, st.sampled_from(_DTYPES), st.booleans()),
  min_size=1,
  max_size=12,
)


class _Codec:
  """Stands for a codec."""

  block_length = 4


def _arrays(described):
  """Arrays of which no two elements are alike, as far as their dtype allows."""
  return [
    (1000 * i + np.arange(np.prod(shape, dtype=int)))
    .astype(dtype)
    .reshape(shape)
    for i, (shape, dtype, _) in enumerate(described)
  ]


def _pack(tensors, bucket_bytes, alone_bytes):
  return packing.pack(tensors, bucket_bytes, alone_bytes)


def _round_trip(arrays, is_unknown, bucket_bytes, alone_bytes):
  """Packs and unpacks in a graph. If `is_unknown`, the shape is not static.

  Returns:
    The unpacked arrays, the buckets as arrays, and the members of each bucket.
  """
  packed_members = []
  signature = [
    tf.TensorSpec([None] * a.ndim if unknown else a.shape, a.dtype)
    for a, unknown in zip(arrays, is_unknown, strict=True)
  ]

  @tf.function(input_signature=[signature])
  def there_and_back(tensors):
    packed = _pack(tensors, bucket_bytes, alone_bytes)
    packed_members.append(packed.members)
    return packed.unpack(packed.buckets), packed.buckets

  back, flat = there_and_back([tf.constant(a) for a in arrays])
  return [t.numpy() for t in back], [b.numpy() for b in flat], packed_members[0]


class BucketsTest(tf.test.TestCase, parameterized.TestCase):
  def assert_buckets(self, arrays, alone, flat, members, bucket_bytes):
    """Every tensor in one bucket, with its own kind, within the limit."""
    self.assertCountEqual(
      [i for m in members for i in m], range(len(arrays)), 'each exactly once'
    )
    ready = [min(m) for m in members]
    self.assertEqual(ready, sorted(ready, reverse=True), 'last tensor first')
    for bucket, inside in zip(flat, members, strict=True):
      self.assertEqual(list(inside), sorted(inside, reverse=True))
      self.assertLen({arrays[i].dtype for i in inside}, 1)
      np.testing.assert_array_equal(
        bucket, np.concatenate([arrays[i].ravel() for i in inside])
      )
      if len(inside) > 1:
        self.assertLessEqual(bucket.nbytes, bucket_bytes)
        self.assertFalse(any(alone[i] for i in inside))

  @hypothesis.settings(max_examples=60)
  @hypothesis.given(
    _TENSORS, st.sampled_from([1, 16, 100, 10_000]), st.sampled_from([1, 40])
  )
  # An empty tensor has no bytes, but shares no bucket with one that is alone.
  @hypothesis.example(
    [((0,), np.float32, False), ((2,), np.float32, True)], 100, 40
  )
  @hypothesis.example(
    [((2,), np.float32, True), ((0,), np.float32, False)], 100, 40
  )
  @hypothesis.example([((), np.float32, False), ((), np.float32, True)], 8, 40)
  @pytest.mark.smoke
  def test_round_trip(self, described, bucket_bytes, alone_bytes):
    arrays = _arrays(described)
    is_unknown = [unknown and shape != () for shape, _, unknown in described]
    back, flat, members = _round_trip(
      arrays, is_unknown, bucket_bytes, alone_bytes
    )
    self.assertLen(back, len(arrays))
    for want, got in zip(arrays, back, strict=True):
      self.assertEqual((want.shape, want.dtype), (got.shape, got.dtype))
      np.testing.assert_array_equal(want, got)
    alone = [
      unknown or a.nbytes >= alone_bytes
      for a, unknown in zip(arrays, is_unknown, strict=True)
    ]
    self.assert_buckets(arrays, alone, flat, members, bucket_bytes)

  def test_literal_plan(self):
    # 4-byte elements: 3 of 12 bytes fit into 40, the fourth does not; 13
    # elements (52 bytes) are above alone_bytes.
    sizes = [3, 3, 13, 3, 3, 3]
    arrays = [
      np.arange(s, dtype=np.float32) + 100 * i for i, s in enumerate(sizes)
    ]
    packed = _pack([tf.constant(a) for a in arrays], 40, 50)
    self.assertEqual(packed.members, ((5, 4, 3), (2,), (1, 0)))
    np.testing.assert_array_equal(
      packed.buckets[0], [500, 501, 502, 400, 401, 402, 300, 301, 302]
    )

  def test_dtypes_are_apart(self):
    tensors = [
      tf.constant([i, i], (tf.uint16, tf.float16)[i % 2]) for i in range(4)
    ]
    packed = _pack(tensors, 1000, 1000)
    self.assertEqual(packed.members, ((3, 1), (2, 0)))
    back = packed.unpack([b + 10 for b in packed.buckets])
    self.assertAllEqual(
      [tf.cast(t, tf.int32) for t in back],
      [[10, 10], [11, 11], [12, 12], [13, 13]],
    )

  def test_tensors_begin_at_blocks_of_their_own(self):
    sizes = [3, 5, 0, 4]
    arrays = [
      np.arange(s, dtype=np.float32) + 100 * i for i, s in enumerate(sizes)
    ]
    tensors = [tf.constant(a) for a in arrays]
    packed = packing.pack(tensors, 1000, 1000, [_Codec] * 4, num_chunks=3)
    self.assertEqual(packed.members, ((3, 2, 1, 0),))
    # 4, 0, 8 and 4 elements, and then a whole number of blocks a chunk.
    [bucket] = packed.buckets
    self.assertLen(bucket, 24)
    np.testing.assert_array_equal(
      bucket[:16],
      [*arrays[3], *arrays[1], 0, 0, 0, *arrays[0], 0],
    )
    np.testing.assert_array_equal(bucket[16:], np.zeros(8))
    for want, got in zip(arrays, packed.unpack(packed.buckets), strict=True):
      np.testing.assert_array_equal(want, got)

  def test_eager_tensors_need_no_graph(self):
    arrays = _arrays([((2, 3), np.float32, False), ((), np.float32, False)])
    packed = _pack([tf.constant(a) for a in arrays], 1000, 1000)
    self.assertLen(packed.buckets, 1)
    for want, got in zip(arrays, packed.unpack(packed.buckets), strict=True):
      np.testing.assert_array_equal(want, got)

  def test_nothing_to_pack(self):
    packed = _pack([], 10, 10)
    self.assertEqual((packed.buckets, packed.members), ((), ()))
    self.assertEqual(packed.unpack([]), [])


if __name__ == '__main__':
  tf.test.main()
