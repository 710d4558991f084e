"""`LazyRows` updates the rows in a gradient exactly as the inner optimizer does."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, virtual_devices
from tf_strategies import errors

virtual_devices.configure()

optimizers = keras.optimizers

_ROWS = np.arange(1, 31, dtype=np.float32).reshape(10, 3) / 10
_IDS = [1, 4, 1, 7]
_USED = [1, 4, 7]


def _gradient(step):
  values = np.random.default_rng(step).normal(size=[len(_IDS), 3])
  return tf.IndexedSlices(
    tf.constant(values, tf.float32), tf.constant(_IDS), tf.constant([10, 3])
  )


def _train(optimizer, gradients, rows=_ROWS):
  """Returns a table after updates, and the optimizer's slots for it."""
  table = keras.Variable(rows)
  optimizer.build([table])

  @tf.function(autograph=False)
  def run():
    for gradient in gradients:
      optimizer.apply([gradient], [table])

  run()
  slots = [v.numpy() for v in optimizer.variables if v.shape == table.shape]
  return table.numpy(), slots


class LazyRowsTest(tf.test.TestCase, parameterized.TestCase):
  # The norm of slices counts the rows that repeat apart.
  @parameterized.parameters(
    *(name for name in dynamic_tables.OPTIMIZERS if name != 'clipnorm')
  )
  def test_rows_with_a_gradient_are_updated_as_a_table_of_them(self, name):
    make = dynamic_tables.OPTIMIZERS[name]
    gradients = [_gradient(step) for step in range(3)]
    table, slots = _train(tfs.keras.LazyRows(make()), gradients)
    # The reference: a table with only these rows, and a dense gradient.
    dense = [tf.convert_to_tensor(g) for g in gradients]
    alone, kept = _train(
      make(), [tf.gather(g, _USED) for g in dense], _ROWS[_USED]
    )
    self.assertAllClose(alone, table[_USED], 1e-6, 1e-6)
    self.assertGreater(np.abs(table - _ROWS)[_USED].min(), 0)
    self.assertLen(slots, len(kept))
    for want, got in zip(kept, slots, strict=True):
      self.assertAllClose(want, got[_USED], 1e-6, 1e-6)
      # These rows were not changed.
      self.assertLen(np.unique(np.delete(got, _USED, 0)), 1)
    self.assertAllEqual(np.delete(table, _USED, 0), np.delete(_ROWS, _USED, 0))

  def test_dense_gradients_are_as_ever(self):
    gradients = [tf.convert_to_tensor(_gradient(s)) for s in range(2)]
    plain, _ = _train(optimizers.Adam(0.1), gradients)
    lazy, _ = _train(tfs.keras.LazyRows('adam'), gradients)
    self.assertNotAllClose(plain, lazy)  # Learning rates differ.
    lazy, _ = _train(tfs.keras.LazyRows(optimizers.Adam(0.1)), gradients)
    self.assertAllClose(plain, lazy, 0, 0)

  @parameterized.named_parameters(
    (
      'several',
      lambda: optimizers.MultiOptimizer(lambda v: optimizers.SGD()),
      r'one rule.*LazyRows\(MultiOptimizer.*wrap those',
    ),
    ('whole', lambda: optimizers.Lamb(), 'each element by itself.*Lamb'),
    (
      'accumulation',
      lambda: optimizers.SGD(gradient_accumulation_steps=2),
      'gradient_accumulation_steps=2.*leave one of them out',
    ),
    (
      'loss_scale',
      lambda: optimizers.LossScaleOptimizer(optimizers.SGD()),
      r'LossScaleOptimizer\(LazyRows',
    ),
  )
  def test_what_is_refused(self, make, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.keras.LazyRows(make())


if __name__ == '__main__':
  tf.test.main()
