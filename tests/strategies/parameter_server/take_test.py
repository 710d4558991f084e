"""Keras's `take` reads rows from a table, with the same results as from a tensor."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers
from tf_strategies.strategies.parameter_server import variables

_VALUE = np.arange(1, 22, dtype=np.float32).reshape(7, 3)

_INDICES = (
  ('matrix', lambda: tf.constant([[0, 6, 3], [3, 3, 5]], tf.int64)),
  ('from_the_end', lambda: np.array([-1, 2, -7], np.int32)),
  ('small_integers', lambda: tf.constant([5, -2], tf.int16)),
  ('ragged', lambda: tf.ragged.constant([[1, -1], [], [2]])),
  ('ragged_twice', lambda: tf.ragged.constant([[[1], [6, 1]], [[]], []])),
  (
    'sparse',
    lambda: tf.SparseTensor([[0, 1], [1, 0], [1, 1]], [5, -1, 5], [2, 3]),
  ),
  ('sparse_without_gaps', lambda: tf.sparse.from_dense([[5, 6], [2, 5]])),
)


class TakeTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    # None that reads a table whole passes.
    self.enter_context(
      mock.patch.object(
        variables.ServerVariable,
        '_read_variable_op',
        side_effect=AssertionError('read whole'),
      )
    )

  def tables(self):
    keras_variable = keras.Variable(_VALUE)
    keras_variable._value = table = local_servers.variable(0, _VALUE)
    parts = local_servers.partitioned_variable(_VALUE, 3)
    return table, parts, keras_variable

  @parameterized.named_parameters(*_INDICES)
  def test_all_kinds_of_ids(self, make_indices):
    want = keras.ops.take(tf.constant(_VALUE), make_indices(), axis=0)
    for table in self.tables():
      found = keras.ops.take(table, make_indices(), axis=0)
      self.assertEqual(type(found), type(want))
      self.assertAllEqual(found, want)


if __name__ == '__main__':
  tf.test.main()
