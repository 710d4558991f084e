"""On one device, DynamicEmbedding equals Embedding without a fixed vocabulary.

Its initial rows come from splitmix64 and have the distributions of Keras. `LazyRows`
updates the same rows of tables of Keras.
"""

import pathlib
import time
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from benchmarks import processes
from tests import dynamic_tables, tf_case, tiers, virtual_devices
from tests.architecture import documents, project
from tf_strategies import errors
from tf_strategies.keras.tables import dynamic_embedding, row_table

virtual_devices.configure()

WIDTH = dynamic_tables.WIDTH
optimizers = keras.optimizers
OPTIMIZERS = dynamic_tables.OPTIMIZERS

_FAR = np.array([[2**62, 2**62 + 1], [-(2**62), 2**62]])


def _embedding(model):
  return model.layers[0]


def _rows(model, ids):
  return np.asarray(_embedding(model)(np.asarray(ids)))


class EqualityTest(tf_case.TestCase):
  def assert_equal(self, optimizer, data, **options):
    found = []
    for is_dynamic in (True, False):
      model = dynamic_tables.model(is_dynamic, optimizer, **options)
      found.append(dynamic_tables.results(model, *data))
    dynamic, static = found
    for name, expected in static.items():
      self.assertAllClose(expected, dynamic[name], 0, 1e-6, name)

  # All use one rule for rows, which `LazyRowsTest` runs for each optimizer.
  @tiers.parameters(*tiers.few(OPTIMIZERS, 'adam', 'clipnorm'))
  def test_all_rows_in_each_batch(self, name):
    self.assert_equal(OPTIMIZERS[name], dynamic_tables.all_in_each_batch())

  @parameterized.parameters(
    {'run_eagerly': True}, {'kind': 'ragged'}, {'kind': 'sparse'}
  )
  def test_eager_steps_and_ids_with_gaps(self, **options):
    x, y = dynamic_tables.all_in_each_batch()
    if 'kind' in options:
      x = dynamic_tables.with_gaps(options['kind'], x)
    self.assert_equal(OPTIMIZERS['adagrad'], (x, y), **options)

  def test_some_rows_in_each_batch_on_one_device(self):
    # LazyRows leaves dynamic tables to their usual optimizer.
    def lazy_adam():
      return tfs.keras.LazyRows(OPTIMIZERS['adam']())

    # 'parameter_server' without a cluster is this strategy.
    with tf.distribute.OneDeviceStrategy(virtual_devices.name(0)).scope():
      for optimizer in (OPTIMIZERS['adagrad'], lazy_adam):
        self.assert_equal(optimizer, dynamic_tables.some_in_each_batch())

  def test_ragged_and_sparse_ids_give_the_rows_of_embedding(self):
    def rows(ids):
      return tf.cast(ids, tf.float32)[:, None] + tf.range(0, 1, 1 / WIDTH)

    table = tf.Variable(rows(tf.range(7)))
    layer = tfs.keras.DynamicEmbedding(WIDTH, rows)
    for ids in (
      tf.ragged.constant([[[1], [6, 1]], [[]], []], dtype=tf.int64),
      tf.SparseTensor([[0, 1], [1, 0], [1, 1]], [5, 6, 5], [2, 3]),
    ):
      want = keras.ops.take(table, ids, axis=0)
      found = layer(ids)
      self.assertEqual(type(found), type(want))
      self.assertAllEqual(found, want)

  def test_compiles_without_xla(self):
    """Checks that the model falls back to `jit_compile=False`, like other Keras layers."""
    with self.assertWarnsRegex(UserWarning, 'jit_compile=False'):
      model = dynamic_tables.model(True, OPTIMIZERS['adam'], jit_compile=True)
    self.assertFalse(model.jit_compile)
    ids = np.array([[1, 2]])
    predicted = model.predict(ids, verbose=0)
    # With XLA, prediction fails.
    _embedding(model).supports_jit = True
    model.compile(jit_compile=True)
    with self.assertRaises(tf.errors.InvalidArgumentError):
      model.predict(ids, verbose=0)
    self.assertAllClose(predicted, model(ids), 0, 1e-6)

  @pytest.mark.smoke
  def test_loop_with_two_lookups_equals_a_static_table(self):
    found = []
    for is_dynamic in (True, False):
      layer, _, step = dynamic_tables.twice(is_dynamic)
      for batch in dynamic_tables.pairs():
        step(batch)
      found.append(layer(np.arange(dynamic_tables.VOCABULARY)))
    self.assertAllClose(*found, 0, 1e-6)

  def test_second_optimizer_has_its_own_state(self):
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

  def test_optimizer_with_replaced_state_is_refused(self):
    """Checks that the state does not depend on when a step is traced."""
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
    first = dynamic_tables.first_rows(_FAR.reshape([-1]))
    self.assertAllClose(_rows(model, _FAR.reshape([-1])), first)
    self.assertEqual(_embedding(model).report()['rows'], 0)
    model.train_on_batch(_FAR, np.ones([2, 1]))
    usage = _embedding(model).usage()
    self.assertAllEqual(usage['ids'], [-(2**62), 2**62, 2**62 + 1])
    self.assertAllEqual(usage['uses'], [1, 1, 1])
    self.assertAllEqual(usage['steps'], [0, 0, 0])

  def test_updates_of_several_threads_are_all_applied(self):
    shard = row_table.TableShard(1, lambda ids: tf.zeros([tf.size(ids), 1]))

    def slowly(rows):
      time.sleep(0.002)
      return rows

    def rule(state, gradient):
      [rows] = state.values()
      rows.assign(tf.numpy_function(slowly, [rows.tensor], tf.float32))
      rows.assign_add(gradient)

    @tf.function(autograph=False)
    def update():
      ids, one = tf.constant([7], tf.int64), tf.ones([1, 1])
      shard.update(ids, one, tf.constant(0.0), rule, {})

    update.get_concrete_function()
    with futures.ThreadPoolExecutor(4) as pool:
      list(pool.map(lambda _: update(), range(40)))
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


class SavingTest(tf_case.TestCase):
  def trained(self, optimizer='adam'):
    model = dynamic_tables.model(True, OPTIMIZERS[optimizer])
    x, y = dynamic_tables.all_in_each_batch()
    model.train_on_batch(x[:8], y[:8])
    return model

  @tiers.parameters('adam', tiers.soak('ftrl'))
  def test_keras_file_has_rows_and_their_state(self, optimizer):
    model = self.trained(optimizer)
    path = self.path('model.keras')
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
    path = self.path('model.weights.h5')
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
  def test_save_between_two_batches_does_not_change_training(self, optimizer):
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
    path = self.path('exported')
    model.export(path, verbose=False)
    ids = np.array([[1, 2], [2**50, 3]])
    exported = tf.saved_model.load(path)
    self.assertAllClose(model(ids), exported.serve(ids), 0, 1e-6)

  def test_empty_table_can_be_saved(self):
    model = dynamic_tables.model(True, OPTIMIZERS['adam'])
    self.assertIsNotNone(tfs.Run(self.directory, model).save(0))
    other = self.trained()
    tfs.Run(self.directory, other).restore()
    self.assertEqual(_embedding(other).report()['rows'], 0)
    file = self.path('model.keras')
    model.save(file)
    loaded = keras.models.load_model(file)
    self.assertEqual(_embedding(loaded).report()['rows'], 0)


class RefusalTest(tf_case.TestCase):
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
  def test_unsupported_optimizer_is_refused(self, optimizer, expected):
    model = dynamic_tables.model(True, optimizer)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, expected):
      model.train_on_batch(_FAR, np.ones([2, 1]))

  def test_decay_that_excludes_the_table_is_accepted(self):
    model = dynamic_tables.model(True, lambda: optimizers.AdamW(0.1))
    model.optimizer.exclude_from_weight_decay(
      var_list=_embedding(model).trainable_variables
    )
    self.assertIsNotNone(model.train_on_batch(_FAR, np.ones([2, 1])))
    self.assertEqual(_embedding(model).report()['rows'], 3)

  def test_invalid_uses_are_refused(self):
    make = tfs.keras.DynamicEmbedding
    layer = make(2)
    normal = keras.initializers.RandomNormal(seed=3)
    model = dynamic_tables.model(True, OPTIMIZERS['sgd'])
    for use, message in (
      (lambda: make(0), 'output_dim'),
      (lambda: make(2, seed=1.5), 'seed'),
      (lambda: make(2, dtype='float16'), 'float16'),
      (lambda: make(2, 'glorot_uniform'), 'RandomUniform.*GlorotUniform'),
      (lambda: make(2, normal), 'seed= to Dynamic'),
      (layer.report, 'not built'),
      (lambda: layer(np.ones([2])), 'integer ids, got float'),
      (layer.expire, 'max_age'),
      (model.get_weights, 'save_weights'),
    ):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
        use()

  def test_mirrored_strategies_are_refused(self):
    for make in (
      tfs.RingMirroredStrategy,
      tf.distribute.MirroredStrategy,
    ):
      with (
        make(virtual_devices.names(2)).scope(),
        self.assertRaisesRegex(
          errors.UnsupportedOptionError, 'ParameterServer'
        ),
      ):
        tfs.keras.DynamicEmbedding(2)(np.array([1]))


_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_IDS = np.array([0, 1, -1, 2**62, -(2**63), 2**63 - 1])


def _mix(x):
  z = (x + _GOLDEN) & _MASK
  z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
  return z ^ (z >> 31)


def _uniform(i, seed, column):
  state = (_mix(int(i) & _MASK) ^ _mix(seed)) + column * _GOLDEN
  return ((_mix(state & _MASK) >> 41) + 0.5) * 2.0**-23


def _initial_rows(initializer, ids, seed=7, width=3):
  initializer = keras.initializers.get(initializer)
  make = dynamic_embedding.initial_rows(initializer, seed, width)
  return make(tf.constant(ids, tf.int64)).numpy()


class RowInitializersTest(tf_case.TestCase):
  def test_rows_depend_only_on_seed_id_and_column(self):
    # The published first number of the generator with seed 0.
    self.assertEqual(_mix(0), 0xE220A8397B1DCDAF)
    uniform = keras.initializers.RandomUniform(0.0, 1.0)
    expected = [[_uniform(i, 7, j) for j in range(3)] for i in _IDS]
    self.assertAllClose(_initial_rows(uniform, _IDS), expected, 0, 1e-7)
    self.assertAllEqual(
      _initial_rows(uniform, _IDS[::-1])[::-1], _initial_rows(uniform, _IDS)
    )
    self.assertNotAllClose(_initial_rows(uniform, _IDS, seed=8), expected)

  @parameterized.named_parameters(
    ('normal', keras.initializers.RandomNormal(1.0, 0.2), 1.0, 0.2, None),
    (
      'truncated',
      keras.initializers.TruncatedNormal(1.0, 0.2),
      1.0,
      # Standard deviation of a normal distribution truncated at two.
      0.2 * 0.8796,
      0.4,
    ),
  )
  def test_initial_rows_have_the_expected_distribution(
    self, initializer, mean, deviation, most
  ):
    rows = _initial_rows(initializer, np.arange(20_000), width=5)
    self.assertAllClose(
      rows.mean(0), np.full([5], mean), 0, 4 * deviation / 141
    )
    self.assertAllClose(rows.std(0), np.full([5], deviation), 0.03, 0)
    correlations = np.corrcoef(np.concatenate([rows[1:], rows[:-1]], 1).T)
    self.assertAllClose(correlations, np.eye(10), 0, 0.04)
    self.assertAllInRange(abs(rows - mean), 0, most or 6 * deviation)

  def test_constant_initializers(self):
    for initializer, value in (
      ('zeros', 0.0),
      (keras.initializers.Constant(0.5), 0.5),
    ):
      self.assertAllEqual(
        _initial_rows(initializer, _IDS), np.full([6, 3], value)
      )

  def test_initializer_function(self):
    double = dynamic_embedding.initial_rows(
      lambda ids: tf.cast(ids[:, None] * [2, 3], tf.float32), 0, 2
    )
    self.assertAllEqual(double(tf.constant([5])), [[10.0, 15.0]])
    narrow = dynamic_embedding.initial_rows(lambda ids: ids, 0, 2)
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'one row'):
      narrow(tf.constant([5]))


_LOAD = """
import keras, numpy as np
model = keras.models.load_model({path!r})
x = np.array({x})
print(type(model.optimizer).__name__, model.predict(x, verbose=0).tolist())
"""


class SavedModelsTest(absltest.TestCase):
  def test_documented_import_fixes_loading(self):
    model = keras.Sequential(
      [keras.Input([1], dtype='int64'), tfs.keras.DynamicEmbedding(2)]
    )
    model.compile('sgd', 'mse')
    path = str(pathlib.Path(self.create_tempdir(), 'm.keras'))
    model.save(path)
    x = [[7], [9]]
    program = _LOAD.format(path=path, x=x)

    failed = processes.run_python('-c', program)
    self.assertNotEqual(failed.returncode, 0)
    (error,) = (
      block.body
      for block in documents.blocks(
        project.text_files()['docs/errors.md'], 'text'
      )
      if 'Could not locate class' in block.body
    )
    self.assertIn(error.partition('...')[0].strip(), failed.stderr)

    program = f'import tf_strategies.keras\n{program}'
    done = processes.run_python('-c', program, is_checked=True)
    expected = model.predict(np.array(x), verbose=0).tolist()
    self.assertEqual(done.stdout, f'SGD {expected}\n')


_ROWS = np.arange(1, 31, dtype=np.float32).reshape(10, 3) / 10
_TRAINED_IDS = [1, 4, 1, 7]
_USED = [1, 4, 7]


def _gradient(step):
  values = np.random.default_rng(step).normal(size=[len(_TRAINED_IDS), 3])
  return tf.IndexedSlices(
    tf.constant(values, tf.float32),
    tf.constant(_TRAINED_IDS),
    tf.constant([10, 3]),
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


class LazyRowsTest(tf_case.TestCase):
  # Clipping by norm is left out: it counts repeated rows of slices separately.
  @parameterized.parameters(
    *(name for name in dynamic_tables.OPTIMIZERS if name != 'clipnorm')
  )
  def test_only_rows_with_a_gradient_are_updated(self, name):
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

  def test_dense_gradients_are_applied_unchanged(self):
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
  def test_unsupported_inner_optimizer_is_refused(self, make, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.keras.LazyRows(make())


if __name__ == '__main__':
  tf.test.main()
