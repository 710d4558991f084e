"""A variable in parts reads, writes and differentiates like one tensor.

Keras's `take` reads rows from variables on servers as from a tensor.
"""

import pathlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import local_servers
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import variables

_VALUE = np.arange(1, 22, dtype=np.float32).reshape(7, 3)


class PartitionedVariableTest(local_servers.LocalServersTestCase):
  def make(self, parts=3, value=_VALUE, **options):
    return local_servers.partitioned_variable(value, parts, **options)

  @pytest.mark.smoke
  def test_parts_form_one_variable(self):
    """Also checks that parts hold consecutive rows."""
    variable = self.make()
    self.assertEqual(variable.sizes, (3, 2, 2))
    self.assertAllEqual(np.concatenate(variable.parts), _VALUE)
    self.assertEqual(variable.shape, [7, 3])
    self.assertEqual(variable.dtype, tf.float32)
    self.assertAllEqual(variable.numpy(), _VALUE)
    self.assertAllEqual(tf.convert_to_tensor(variable), _VALUE)
    self.assertAllEqual(variable + 1.0, _VALUE + 1)
    self.assertTrue(variable.is_initialized().numpy())
    self.assertLen({p.device for p in variable.parts}, 3)

  def test_assignments_write_the_whole_value(self):
    variable, delta = self.make(), 100.0 + _VALUE[::-1]
    for write, value, expected in (
      (variable.assign_add, delta, _VALUE + delta),
      (variable.assign_sub, _VALUE, delta),
      (variable.assign, _VALUE, _VALUE),
    ):
      write(value)
      self.assertAllEqual(variable, expected)
    with self.assertRaises((ValueError, tf.errors.InvalidArgumentError)):
      variable.assign(np.ones([6, 3], np.float32))

  def test_export_is_as_large_as_on_one_device(self):
    value = np.random.default_rng(0).normal(size=[5000, 4]).astype(np.float32)
    ids = np.asarray([[0, 4999, 2500], [7, 7, 1667]], np.int32)
    sizes = []
    for parts in (0, 3):
      layer = keras.layers.Embedding(5000, 4)
      model = keras.Sequential([keras.Input([3], dtype='int32'), layer])
      table = self.make(parts, value) if parts else tf.Variable(value)
      layer.embeddings._value = table  # pylint: disable=protected-access
      path = self.create_tempdir().full_path
      model.export(path, verbose=False)
      files = pathlib.Path(path, 'variables').iterdir()
      sizes.append(sum(f.stat().st_size for f in files))
      loaded = tf.saved_model.load(path)
      [found] = loaded.signatures['serving_default'](tf.constant(ids)).values()
      self.assertAllEqual(found, value[ids])
      self.assertAllEqual(loaded.variables[0], value)
      # The model is unchanged, so that training can continue.
      self.assertAllEqual(model(ids), value[ids])
    self.assertLess(sizes[1], 1.01 * sizes[0])

  @parameterized.named_parameters(
    ('matrix', [[0, 6, 3], [3, 1, 5]]),
    ('one_part', [0, 1, 0]),
    ('none', np.zeros([0], np.int32)),
  )
  def test_gather(self, indices):
    indices, variable = tf.constant(indices), self.make()
    expected = tf.gather(tf.constant(_VALUE), indices)
    for read in (
      variable.sparse_read,
      lambda i: tf.gather(variable, i),
      lambda i: tf.nn.embedding_lookup(variable, i),
      lambda i: tf.gather_nd(variable, i[..., None]),
    ):
      self.assertAllEqual(read(indices), expected)
      graph = tf.function(read).get_concrete_function(indices)
      self.assertAllEqual(graph(indices), expected)
      self.assertEqual(graph.outputs[0].shape, expected.shape)

  @parameterized.parameters(-1, 7)
  def test_row_out_of_range_raises(self, index):
    variable = self.make()
    with self.assertRaises(tf.errors.InvalidArgumentError):
      variable.sparse_read(tf.constant([0, index]))

  @parameterized.parameters(True, False)
  def test_gradient(self, in_graph):
    weights = tf.constant(_VALUE[::-1].copy())
    indices = tf.constant([[6, 0], [2, 2]])

    def gradients(variable):
      with tf.GradientTape(persistent=True) as tape:
        dense = tf.reduce_sum(tf.sin(variable * weights))
        rows = tf.reduce_sum(tf.sin(tf.gather(variable, indices)) ** 2)
        losses = dense, rows, dense * rows
      return [
        tf.convert_to_tensor(tape.gradient(loss, variable)) for loss in losses
      ]

    expected = gradients(tf.Variable(_VALUE))
    run = tf.function(gradients) if in_graph else gradients
    self.assertAllClose(expected, run(self.make()), 1e-6, 1e-6)

  def test_gradient_in_parts_can_be_read_whole(self):
    """Checks that updates get the parts themselves, and that clipping gets all rows."""
    variable = self.make()
    rows = tf.IndexedSlices(_VALUE[:4], tf.constant([6, 0, 2, 0]))
    for whole in (rows, tf.constant(_VALUE)):
      parts = variable.split(whole)
      joined = variable.join(parts)
      self.assertIs(variable.split(joined), parts)
      self.assertAllEqual(
        tf.convert_to_tensor(joined),
        tf.math.unsorted_segment_sum(_VALUE[:4], rows.indices, 7)
        if whole is rows
        else _VALUE,
      )
      self.assertIsNot(variable.split(tf.clip_by_norm(joined, 1.0)), parts)

  def test_scatter_outside_of_the_optimizer_is_refused(self):
    variable = self.make()
    rows = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([1]))
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'partitioned.*whole.*scatter_add'
    ):
      variable.scatter_add(rows)
    self.assertAllEqual(variable.numpy(), _VALUE)


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


class TakeTest(local_servers.LocalServersTestCase):
  def setUp(self):
    super().setUp()
    # A read of a whole table fails the test.
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
    return table, local_servers.partitioned_variable(_VALUE, 3), keras_variable

  @parameterized.named_parameters(*_INDICES)
  def test_take_equals_keras_for_all_types_of_ids(self, make_indices):
    want = keras.ops.take(tf.constant(_VALUE), make_indices(), axis=0)
    for table in self.tables():
      found = keras.ops.take(table, make_indices(), axis=0)
      self.assertEqual(type(found), type(want))
      self.assertAllEqual(found, want)


if __name__ == '__main__':
  tf.test.main()
