"""On one device, DynamicEmbedding equals Embedding without a fixed vocabulary."""

import os
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, tiers, virtual_devices
from tf_strategies import errors
from tf_strategies.keras.tables import row_table

virtual_devices.configure()

WIDTH = dynamic_tables.WIDTH
optimizers = keras.optimizers
OPTIMIZERS = dynamic_tables.OPTIMIZERS

_FAR = np.array([[2**62, 2**62 + 1], [-(2**62), 2**62]])


def _embedding(model):
  return model.layers[0]


def _rows(model, ids):
  return np.asarray(_embedding(model)(np.asarray(ids)))


class EqualityTest(tf.test.TestCase, parameterized.TestCase):
  def assert_equal(self, optimizer, data, **options):
    found = []
    for is_dynamic in (True, False):
      model = dynamic_tables.model(is_dynamic, optimizer, **options)
      found.append(dynamic_tables.results(model, *data))
    dynamic, static = found
    for name, expected in static.items():
      self.assertAllClose(expected, dynamic[name], 0, 1e-6, name)

  # All use one rule for rows, which `lazy_rows_test` runs for each optimizer.
  @tiers.parameters(*tiers.few(OPTIMIZERS, 'adam', 'clipnorm'))
  def test_all_rows_in_each_batch(self, name):
    self.assert_equal(OPTIMIZERS[name], dynamic_tables.all_in_each_batch())

  def test_some_rows_in_each_batch_on_one_device(self):
    # 'parameter_server' without a cluster is this strategy.
    strategy = tf.distribute.OneDeviceStrategy(virtual_devices.name(0))
    with strategy.scope():
      self.assert_equal(
        OPTIMIZERS['adagrad'], dynamic_tables.some_in_each_batch()
      )

  def test_eager_steps(self):
    self.assert_equal(
      OPTIMIZERS['adam'], dynamic_tables.all_in_each_batch(), run_eagerly=True
    )

  @parameterized.parameters('ragged', 'sparse')
  def test_ragged_and_sparse_ids(self, kind):
    x, y = dynamic_tables.all_in_each_batch()
    x = dynamic_tables.with_gaps(kind, x)
    self.assert_equal(OPTIMIZERS['adagrad'], (x, y), kind=kind)

  def test_ids_of_all_kinds_have_the_rows_that_embedding_gives(self):
    def rows(ids):
      return tf.cast(ids, tf.float32)[:, None] + tf.range(0, 1, 1 / WIDTH)

    table = tf.Variable(rows(tf.range(7)))
    layer = tfs.keras.DynamicEmbedding(WIDTH, rows)
    for ids in (
      tf.ragged.constant([[[1], [6, 1]], [[]], []], dtype=tf.int64),
      tf.SparseTensor([[0, 1], [1, 0], [1, 1]], [5, 6, 5], [2, 3]),
      tf.sparse.from_dense(tf.constant([[5, 6], [2, 5]], tf.int64)),
    ):
      want = keras.ops.take(table, ids, axis=0)
      found = layer(ids)
      self.assertEqual(type(found), type(want))
      self.assertAllEqual(found, want)

  def test_compiles_without_xla(self):
    """Checks that the model falls back to no XLA, as Keras does for such layers."""
    with self.assertWarnsRegex(UserWarning, 'jit_compile=False'):
      model = dynamic_tables.model(True, OPTIMIZERS['adam'], jit_compile=True)
    self.assertFalse(model.jit_compile)
    ids = np.array([[1, 2]])
    predicted = model.predict(ids, verbose=0)
    # With XLA it fails.
    _embedding(model).supports_jit = True
    model.compile(jit_compile=True)
    with self.assertRaises(tf.errors.InvalidArgumentError):
      model.predict(ids, verbose=0)
    self.assertAllClose(predicted, model(ids), 0, 1e-6)

  def test_lazy_rows(self):
    """Checks that LazyRows leaves dynamic tables to their usual optimizer."""

    def optimizer():
      return tfs.keras.LazyRows(OPTIMIZERS['adam']())

    self.assert_equal(optimizer, dynamic_tables.some_in_each_batch())

  @pytest.mark.smoke
  def test_loop_that_reads_twice(self):
    found = []
    for is_dynamic in (True, False):
      layer, _, step = dynamic_tables.twice(is_dynamic)
      for batch in dynamic_tables.pairs():
        step(batch)
      found.append(layer(np.arange(dynamic_tables.VOCABULARY)))
    self.assertAllClose(*found, 0, 1e-6)

  def test_a_second_optimizer_has_state_of_its_own(self):
    x, y = dynamic_tables.all_in_each_batch()
    found = []
    for is_dynamic in (True, False):
      model = dynamic_tables.model(is_dynamic, OPTIMIZERS['adam'])
      for _ in range(2):
        model.compile(optimizers.Adam(0.1), 'mse')
        for rows in (slice(0, 8), slice(8, 16)):
          model.train_on_batch(x[rows], y[rows])
      found.append(model(x))
    self.assertAllClose(*found, 0, 1e-6)

  def test_an_optimizer_whose_state_another_has_replaced_is_refused(self):
    """Checks this error: otherwise the state would depend on when a step is traced."""
    layer = tfs.keras.DynamicEmbedding(WIDTH)
    layer.build([None])
    ids = np.arange(3)
    first, second = (optimizers.Adagrad(0.1, name=n) for n in ('one', 'two'))
    for optimizer in (first, first, second):
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids))
      gradients = tape.gradient(loss, layer.trainable_variables)
      optimizer.apply(gradients, layer.trainable_variables)
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "rows of .*'one' after"
    ):
      first.apply(gradients, layer.trainable_variables)
    second.apply(gradients, layer.trainable_variables)


class TableTest(tf.test.TestCase):
  def test_only_training_stores_rows(self):
    model = dynamic_tables.model(True, OPTIMIZERS['sgd'])
    model.predict(_FAR, verbose=0)
    model.evaluate(_FAR, np.ones([2, 1]), verbose=0)
    self.assertAllClose(
      _rows(model, _FAR),
      dynamic_tables.first_rows(_FAR.reshape([-1]))
      .numpy()
      .reshape([2, 2, WIDTH]),
    )
    self.assertEqual(_embedding(model).report()['rows'], 0)
    model.train_on_batch(_FAR, np.ones([2, 1]))
    usage = _embedding(model).usage()
    self.assertAllEqual(usage['ids'], [-(2**62), 2**62, 2**62 + 1])
    self.assertAllEqual(usage['uses'], [1, 1, 1])
    self.assertAllEqual(usage['steps'], [0, 0, 0])

  def test_ids_of_64_bits_have_rows_of_their_own(self):
    layer = tfs.keras.DynamicEmbedding(WIDTH)
    ids = np.array([2**62, 2**62 + 1, -(2**62), 0, 2**32, -1])
    rows = layer(ids).numpy()
    self.assertLen({row.tobytes() for row in rows}, len(ids))
    self.assertAllEqual(layer(ids.astype(np.int32)[3:4]), rows[3:4])

  def test_updates_of_several_threads_are_all_there(self):
    shard = row_table.TableShard(1, lambda ids: tf.zeros([tf.size(ids), 1]))

    def slowly(rows):
      time.sleep(0.002)
      return rows

    def rule(rows, slots, gradient):
      rows = tf.reshape(tf.numpy_function(slowly, [rows], tf.float32), [-1, 1])
      return rows + tf.convert_to_tensor(gradient), slots

    @tf.function(autograph=False)
    def update():
      ids, one = tf.constant([7], tf.int64), tf.ones([1, 1])
      with shard.locked() as written:
        found = shard.updated(ids, one, tf.constant(0.0), rule, {})
        written += shard.store(*found)

    update.get_concrete_function()
    threads = [
      threading.Thread(target=lambda: [update() for _ in range(10)])
      for _ in range(4)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    value, uses, _ = shard.stored_of(tf.constant([7], tf.int64)).numpy()[0]
    self.assertEqual((uses, value), (40.0, 40.0))

  def test_expires_by_age_and_by_frequency(self):
    model = dynamic_tables.model(True, OPTIMIZERS['adam'])
    layer = _embedding(model)
    for ids in ([1, 1], [2, 3], [4, 1], [5, 4]):
      model.train_on_batch(np.array([ids]), np.ones([1, 1]))
    for wrong in ({'max_age': -1}, {'max_age': True}, {'min_uses': 1.5}):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, 'integer'):
        layer.expire(**wrong)
    self.assertEqual(layer.expire(max_age=1, min_uses=2), 2)  # Rows 2 and 3.
    self.assertAllEqual(layer.usage()['ids'], [1, 4, 5])
    self.assertEqual(layer.expire(max_age=0), 1)  # Row 1, used a step earlier.
    self.assertEqual(layer.expire(min_uses=2), 1)  # Row 5.
    self.assertEqual(layer.report(), {'rows': 1, 'by_shard': [1], 'expired': 4})
    self.assertAllClose(_rows(model, [2]), dynamic_tables.first_rows([2]))
    # A row that returns also starts with new optimizer state.
    others = dynamic_tables.model(True, OPTIMIZERS['adam'])
    for each in (model, others):
      each.layers[2].set_weights(others.layers[2].get_weights())
      each.optimizer.iterations.assign(4)
      each.train_on_batch(np.array([[2, 3]]), np.ones([1, 1]))
    self.assertAllClose(_rows(model, [2, 3]), _rows(others, [2, 3]))


class SavingTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def trained(self, optimizer='adam'):
    model = dynamic_tables.model(True, OPTIMIZERS[optimizer])
    x, y = dynamic_tables.all_in_each_batch()
    model.train_on_batch(x[:8], y[:8])
    return model

  @tiers.parameters('adam', tiers.soak('ftrl'))
  def test_keras_file_has_rows_and_their_state(self, optimizer):
    model = self.trained(optimizer)
    path = os.path.join(self.directory, 'model.keras')
    model.save(path)
    loaded = keras.models.load_model(path)
    expected, actual = (
      dynamic_tables.results(m, *dynamic_tables.some_in_each_batch())
      for m in (model, loaded)
    )
    for name, value in expected.items():
      self.assertAllClose(value, actual[name], 0, 1e-6)
    expected, actual = (_embedding(m).usage() for m in (model, loaded))
    for name, value in expected.items():
      self.assertAllEqual(value, actual[name])

  def test_weights_file_has_rows(self):
    model = self.trained()
    path = os.path.join(self.directory, 'model.weights.h5')
    model.save_weights(path)
    loaded = dynamic_tables.model(True, OPTIMIZERS['sgd'])
    loaded.load_weights(path)
    ids = np.arange(10)
    self.assertAllEqual(_rows(model, ids), _rows(loaded, ids))
    # SGD does not use Adam's state.
    loaded.train_on_batch(np.array([[1, 2]]), np.ones([1, 1]))
    self.assertEmpty(_embedding(loaded)._table.slots)

  @tiers.parameters(
    tiers.soak(lambda: optimizers.Adam(0.1)),
    tiers.soak(lambda: tfs.keras.LazyRows(optimizers.SGD(0.1, momentum=0.9))),
    lambda: tfs.keras.LazyRows(optimizers.Adam(0.1)),
  )
  def test_a_save_between_two_batches_changes_nothing(self, optimizer):
    """Saves between batches, also with wrapped optimizers and retraced steps."""
    x, y = dynamic_tables.all_in_each_batch()
    models = [dynamic_tables.model(True, optimizer) for _ in range(3)]
    whole, saved, resumed = models
    for model in (whole, saved):
      model.train_on_batch(x[:8], y[:8])
    tfs.Run(self.directory, saved).save(1, 0)
    slots = _embedding(whole)._table.slots
    self.assertEqual(_embedding(saved)._table.slots, slots)
    tfs.Run(self.directory, resumed).restore()
    # A batch of another size traces the step again.
    for rows in (slice(8, 16), slice(16, 20)):
      for model in models:
        model.train_on_batch(x[rows], y[rows])
    for model in (saved, resumed):
      self.assertAllClose(whole(x), model(x), 0, 1e-6)

  def test_export_has_rows(self):
    model = self.trained()
    path = os.path.join(self.directory, 'exported')
    model.export(path, verbose=False)
    ids = np.array([[1, 2], [2**50, 3]])
    exported = tf.saved_model.load(path)
    self.assertAllClose(model(ids), exported.serve(ids), 0, 1e-6)

  def test_an_empty_table_can_be_saved(self):
    model = dynamic_tables.model(True, OPTIMIZERS['adam'])
    path = tfs.Run(self.directory, model).save(0)
    self.assertIsNotNone(path)
    other = self.trained()
    tfs.Run(self.directory, other).restore()
    self.assertEqual(_embedding(other).report()['rows'], 0)
    file = os.path.join(self.directory, 'model.keras')
    model.save(file)
    loaded = keras.models.load_model(file)
    self.assertEqual(_embedding(loaded).report()['rows'], 0)


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('ema', lambda: optimizers.Adam(use_ema=True), 'use_ema'),
    (
      'accumulation',
      lambda: optimizers.Adam(gradient_accumulation_steps=2),
      'gradient_accumulation_steps=2',
    ),
    ('decay', lambda: optimizers.AdamW(), 'exclude_from_weight_decay'),
    ('global', lambda: optimizers.SGD(global_clipnorm=1.0), 'global_clipnorm'),
    ('value', lambda: optimizers.SGD(clipvalue=1.0), 'clipvalue=1.0'),
    ('lamb', lambda: optimizers.Lamb(), 'SGD, RMSprop, Adagrad.*Lamb'),
    (
      'loss_scale',
      lambda: optimizers.LossScaleOptimizer(optimizers.SGD()),
      'mixed_bfloat16',
    ),
  )
  def test_optimizers(self, optimizer, expected):
    model = dynamic_tables.model(True, optimizer)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, expected):
      model.train_on_batch(_FAR, np.ones([2, 1]))

  def test_decay_that_leaves_out_the_table(self):
    model = dynamic_tables.model(True, lambda: optimizers.AdamW(0.1))
    model.optimizer.exclude_from_weight_decay(
      var_list=_embedding(model).trainable_variables
    )
    self.assertIsNotNone(model.train_on_batch(_FAR, np.ones([2, 1])))
    self.assertEqual(_embedding(model).report()['rows'], 3)

  @parameterized.named_parameters(
    ('shape', 'glorot_uniform', 'RandomUniform.*GlorotUniform'),
    ('seed', keras.initializers.RandomNormal(seed=3), 'seed= to Dynamic'),
  )
  def test_initializers(self, initializer, expected):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, expected):
      tfs.keras.DynamicEmbedding(WIDTH, initializer)

  def test_arguments(self):
    for arguments in (
      {'output_dim': 0},
      {'output_dim': 2, 'seed': 1.5},
      {'output_dim': 2, 'dtype': 'float16'},
    ):
      with self.assertRaises(errors.UnsupportedOptionError):
        tfs.keras.DynamicEmbedding(**arguments)
    layer = tfs.keras.DynamicEmbedding(2)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'not built'):
      layer.report()
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'integer ids, got float32'
    ):
      layer(np.ones([2], np.float32))
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'max_age'):
      layer.expire()

  def test_strategies_with_copies(self):
    for make in (
      lambda: tfs.RingMirroredStrategy(
        [virtual_devices.name(0), virtual_devices.name(1)]
      ),
      lambda: tf.distribute.MirroredStrategy([virtual_devices.name(0)]),
    ):
      with (
        make().scope(),
        self.assertRaisesRegex(
          errors.UnsupportedOptionError, 'ParameterServer'
        ),
      ):
        tfs.keras.DynamicEmbedding(2)(np.array([1]))

  def test_get_weights(self):
    model = dynamic_tables.model(True, OPTIMIZERS['sgd'])
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'save_weights'):
      model.get_weights()


if __name__ == '__main__':
  tf.test.main()
