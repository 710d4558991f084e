"""Matrices of pieces come out of their buckets as they went in."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies.collectives import codecs
from tf_strategies.cross_device import packing

virtual_devices.configure()

_ROWS = 3


def _matrices(*columns):
  """Returns matrices whose elements all differ."""
  made, start = [], 0
  for count in columns:
    values = np.arange(start, start + _ROWS * count, dtype='f4')
    made.append(tf.constant(values.reshape(_ROWS, count)))
    start += _ROWS * count
  return made


class PackTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(codec=(None, 'int8'), bucket_bytes=(1, 100, 1 << 20))
  def test_round_trip(self, codec, bucket_bytes):
    matrices = [*_matrices(5, 1, 8, 3), tf.constant([[1], [2], [3]])]
    each = codec and [codecs.get(codec)] * len(matrices)
    packed = packing.pack(matrices, bucket_bytes, codecs=each, num_rows=_ROWS)
    self.assertEqual(
      [b.shape.as_list() for b in packed.buckets],
      [[_ROWS * sum(lengths)] for lengths in packed.lengths],
    )
    for before, after in zip(
      matrices, packed.unpack(packed.buckets, _ROWS), strict=True
    ):
      self.assertAllEqual(before, after)

  def test_a_row_of_each_bucket_is_a_replicas_pieces(self):
    matrices = _matrices(2, 3)
    packed = packing.pack(matrices, 1 << 20, num_rows=_ROWS)
    [bucket] = packed.buckets
    [members] = packed.members
    self.assertEqual(members, (1, 0))
    for place, row in enumerate(tf.reshape(bucket, [_ROWS, -1])):
      own = packed.unpack([row], 1)
      for matrix, piece in zip(matrices, own, strict=True):
        self.assertAllEqual(piece[0], matrix[place])

  def test_no_two_matrices_share_a_block(self):
    packed = packing.pack(
      _matrices(5, 300, 256),
      1 << 20,
      codecs=[codecs.get('int8')] * 3,
      num_rows=_ROWS,
    )
    self.assertEqual(packed.lengths, ((256, 512, 256),))


if __name__ == '__main__':
  tf.test.main()
