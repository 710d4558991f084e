"""Which exponents of what virtual shards add up travel together."""

import tensorflow as tf
from absl.testing import absltest, parameterized

from tf_strategies.strategies.mirrored import shard_exchange

_MIB = 1 << 20


class GroupsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('nothing', [], []),
    ('one', [3], [[0]]),
    ('pairs_of_large_ones', [6, 6, 6, 6], [[0, 1], [2, 3]]),
    ('a_small_rest', [6, 6, 6, 6, 0.5], [[0, 1], [2, 3, 4]]),
    ('a_large_rest', [6, 6, 6, 6, 1], [[0, 1], [2, 3], [4]]),
    ('full_buckets', [8, 8, 8], [[0], [1], [2]]),
    ('small_ones', [1, 2, 0.1], [[0, 1, 2]]),
    ('a_small_one_between', [8, 0.1, 8], [[0], [1, 2]]),
  )
  def test_groups(self, megabytes, want):
    buckets = [tf.zeros([int(n * _MIB) // 4]) for n in megabytes]
    self.assertEqual(shard_exchange.groups_of(buckets, 8 * _MIB), want)

  def test_bytes_of_other_dtypes(self):
    buckets = [tf.zeros([_MIB], dtype) for dtype in (tf.float64, tf.int32)] * 2
    found = shard_exchange.groups_of(buckets, 8 * _MIB)
    self.assertEqual(found, [[0], [1, 2], [3]])


if __name__ == '__main__':
  absltest.main()
