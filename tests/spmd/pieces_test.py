"""Pieces of flat tensors, for every length and every number of replicas."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies.spmd import kinds, pieces

virtual_devices.configure()

# (elements, pieces): no padding, padding, last piece empty, most pieces empty.
_CASES = ((12, 3), (13, 3), (5, 4), (1, 4))


class PiecesTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_cut_rows_and_joined(self, elements, count):
    shard = kinds.Shard(count)
    whole = tf.constant(np.arange(elements) + 100.0, tf.float32)
    length = -(-elements // count)
    self.assertEqual(shard.length(elements), length)
    expected = np.zeros(count * length, 'f4')
    expected[:elements] = whole.numpy()
    expected = expected.reshape(count, length)
    self.assertAllEqual(pieces.rows(whole, shard), expected)
    for place in range(count):
      self.assertAllEqual(pieces.cut(whole, shard, place), expected[place])
    self.assertAllEqual(pieces.joined(expected, [elements]), whole)

  @parameterized.parameters(*_CASES)
  def test_a_place_that_is_known_when_it_runs(self, elements, count):
    shard = kinds.Shard(count)
    whole = tf.constant(np.arange(elements) + 100.0, tf.float32)

    @tf.function
    def cut(place):
      piece = pieces.cut(whole, shard, place)
      self.assertEqual(piece.shape.as_list(), [shard.length(elements)])
      return piece

    for place in range(count):
      self.assertAllEqual(
        cut(tf.constant(place)), pieces.cut(whole, shard, place)
      )

  @parameterized.product(
    case=_CASES, op=('sum', 'prod', 'max', 'min', 'all', 'any')
  )
  def test_what_fills_up_does_not_count(self, case, op):
    elements, count = case
    shard = kinds.Shard(count)
    values = -np.arange(1, elements + 1) / 7
    whole = tf.constant(values, tf.float32)
    fill = 3.0
    if op in ('all', 'any'):
      whole, fill = tf.fill([elements], op == 'all'), op != 'all'
    length = shard.length(elements)
    found = []
    for place in range(count):
      own = pieces.cut(whole, shard, place)
      # The padding holds arbitrary values of the optimizer.
      is_own = tf.range(length) < elements - place * length
      own = tf.where(is_own, own, tf.constant(fill, own.dtype))
      counted = pieces.counted(own, shard, elements, place, op)
      found.append(pieces.REDUCE[op](counted))
    reduced = pieces.REDUCE[op](tf.stack(found))
    self.assertAllClose(reduced, pieces.REDUCE[op](whole))


if __name__ == '__main__':
  tf.test.main()
