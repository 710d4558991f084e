"""Programs with variables that replicas divide give one device's results.

Each case is a function of a batch and of a variable. Each of three replicas
holds a piece of the variable. One replica may have no rows.
"""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.spmd import replicas
from tf_strategies import errors
from tf_strategies.spmd import emit, kinds, pieces

virtual_devices.configure()

_COUNT = 3
_SHAPE = (5, 2)  # Three pieces of four elements; the last one is padded.
_MATRIX = np.arange(10, dtype='f4').reshape(_SHAPE)


class _Divided:
  """A variable and its pieces."""

  is_part = is_single = False
  shard = kinds.Shard(_COUNT)

  def __init__(self, value):
    self.variable = tf.Variable(value, name='slot')
    self.pieces = [
      tf.Variable(pieces.cut(self.variable, self.shard, place))
      for place in range(_COUNT)
    ]

  def handle(self, at):
    return self.pieces[at.replica].handle


CASES = {
  # The function, and its exchanges in any order.
  'reductions': (
    lambda x, slot: [
      tf.reduce_max(slot),
      tf.reduce_min(tf.exp(slot)),
      tf.reduce_mean(slot + 1.0),
      tf.reduce_all(slot < 100.0),
      tf.reduce_any(slot > 100.0),
      tf.nn.l2_loss(slot),
      tf.reduce_prod(slot, [0, 1], keepdims=True),
    ],
    {'add', 'gather'},
  ),
  'repeated': (
    lambda x, slot: [
      slot * tf.constant([2.0, 3.0]),  # A vector beside a matrix.
      slot[0] * tf.constant(_MATRIX),
      tf.reshape(slot, [-1]) * 2.0,
      tf.cast(slot, tf.float64) * tf.cast(tf.shape(slot)[0], tf.float64),
    ],
    {'join'},
  ),
  'rows_beside_a_shard': (
    lambda x, slot: [
      x @ slot,
      tf.reduce_sum(x @ slot) + tf.reduce_sum(tf.square(slot)),
      tf.reduce_sum(x, 0)[:, None] + slot,
    ],
    {'add', 'join', 'gather'},
  ),
}


class ShardsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    case=tuple(CASES), rows=((2, 2, 2), (0, 5, 1)), many=(1, 500)
  )
  def test_equals_one_device(self, case, rows, many):
    # From so many nodes on a block is a function.
    for name in ('_MANY_NODES', '_MOST_INLINED'):
      self.enter_context(mock.patch.object(emit, name, many))
    function, meetings = CASES[case]
    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, _SHAPE[0])).astype('f4')
    value = rng.normal(size=_SHAPE).astype('f4')
    found, met = replicas.run(function, [x], rows, [_Divided(value)])
    expected = function(tf.constant(x), tf.Variable(value))
    for a, b in zip(found, expected, strict=True):
      self.assertAllClose(a, b, 1e-5, 1e-5)
    self.assertEqual(set(met), meetings)

  @parameterized.parameters(
    lambda x, slot: tf.gather(slot, [0]),
    lambda x, slot: tf.while_loop(
      lambda i: i < 2, lambda i: [i + tf.cast(slot[0, 0], tf.int32)], [0]
    ),
  )
  def test_an_operation_that_uses_a_divided_variable_otherwise(self, function):
    slot, x = _Divided(np.ones(_SHAPE, 'f4')), np.ones((6, _SHAPE[0]), 'f4')
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'shard_optimizer_state'
    ):
      replicas.run(function, [x], (2, 2, 2), [slot])


if __name__ == '__main__':
  tf.test.main()
