"""`LazyRows` updates the rows in a gradient exactly as the inner optimizer does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, virtual_devices
from tf_strategies import errors
from tf_strategies.keras.tables import row_updates

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

  @pytest.mark.smoke
  def test_the_same_on_replicas(self):
    def fit(strategy):
      keras.utils.set_random_seed(2)
      with strategy.scope():
        model = keras.Sequential(
          [
            keras.layers.Input([2], dtype='int32'),
            keras.layers.Embedding(20, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
          ]
        )
        model.compile(tfs.keras.LazyRows(optimizers.Adam(0.1)), 'mse')
      ids = np.random.default_rng(0).integers(0, 12, [24, 2])
      model.fit(ids, np.ones([24, 1]), batch_size=7, shuffle=False, verbose=0)
      return model.get_weights()

    devices = [virtual_devices.name(i) for i in range(3)]
    want = fit(tf.distribute.get_strategy())
    found = fit(tfs.create_strategy('ring_mirrored', devices=devices))
    for a, b in zip(want, found, strict=True):
      self.assertAllClose(a, b, 1e-6, 1e-6)

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


class RowUpdatesTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('sgd', lambda: optimizers.SGD(0.1, 0.9), True),
    ('clipped', lambda: optimizers.SGD(clipnorm=1.0), False),
    ('adagrad', lambda: optimizers.Adagrad(), False),
    ('lazy', lambda: tfs.keras.LazyRows('adam'), True),
    (
      'lazy_in_a_loss_scale',
      lambda: optimizers.LossScaleOptimizer(tfs.keras.LazyRows('adam')),
      True,
    ),
  )
  def test_what_takes_sums(self, make, takes):
    self.assertEqual(row_updates.takes_sums(make(), clips=True), takes)


if __name__ == '__main__':
  tf.test.main()
