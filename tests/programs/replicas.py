"""Programs whose replicas compute different values.

One device has one replica. Programs whose numbers depend on the replica count
compare them with a formula, and return nothing.
"""

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests.programs import common, fits

layers = keras.layers


def _per_replica(make):
  """Returns one value for each replica, made by `make(replica_id)`."""

  def replica_fn():
    context = tf.distribute.get_replica_context()
    return make(tf.cast(context.replica_id_in_sync_group, tf.int32))

  return tf.distribute.get_strategy().run(replica_fn)


def _gather_replicas(make):
  """Returns the values of all replicas, [replicas, ...], made by
  `make(replica_id)`.
  """
  value = _per_replica(lambda i: make(i)[None])
  return tf.distribute.get_strategy().gather(value, 0).numpy()


def _predicted_in_replicas():
  """Checks that predictions of 32 rows, then of 2 rows, keep their order."""
  strategy = tf.distribute.get_strategy()
  model = common.conv_model()
  x, _ = common.images(34)
  batches = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices(x).batch(32)
  )

  @tf.function
  def predict(batch):
    return strategy.run(lambda b: model(b, training=False), args=(batch,))

  return [strategy.gather(predict(batch), 0).numpy() for batch in batches]


# Collectives.


def _slices():
  """Reduces sparse gradients with repeated rows, on a replica and across replicas."""
  strategy = tf.distribute.get_strategy()
  tokens = np.array([[0, 0], [1, 5], [0, 1], [7, 5]], np.int32)
  table, weights = tf.ones([9, 2]), tf.range(1.0, 5.0)
  data = tf.data.Dataset.from_tensor_slices((tokens, weights)).batch(4)

  def replica_fn(ids, weights):
    with tf.GradientTape() as tape:
      tape.watch(table)
      loss = tf.reduce_sum(tf.gather(table, ids) * weights[:, None, None])
    slices = tape.gradient(loss, table)
    assert isinstance(slices, tf.IndexedSlices), slices
    context = tf.distribute.get_replica_context()
    return tf.convert_to_tensor(context.all_reduce('SUM', slices))

  @tf.function
  def step(ids, weights):
    return strategy.run(replica_fn, args=(ids, weights))

  [batch] = strategy.experimental_distribute_dataset(data)
  first, *others = strategy.experimental_local_results(step(*batch))
  for other in others:
    np.testing.assert_array_equal(first, other)
  return first.numpy()


def _gathered():
  """Gathers values of different lengths, along rows and along columns."""
  strategy = tf.distribute.get_strategy()
  count = strategy.num_replicas_in_sync
  expected = np.concatenate([np.full([1 + i, 2], i) for i in range(count)])
  long = _per_replica(lambda i: tf.fill([1 + i, 2], i))
  np.testing.assert_array_equal(strategy.gather(long, 0), expected)
  wide = _per_replica(lambda i: tf.fill([2, 1 + i], i))
  np.testing.assert_array_equal(strategy.gather(wide, 1), expected.T)


def _reduced():
  """Checks sums and means of each dtype. The results keep the dtype."""
  strategy = tf.distribute.get_strategy()
  count = strategy.num_replicas_in_sync
  total = sum(10.0 * i + np.arange(3) for i in range(count))
  for dtype in ('float32', 'float64', 'int32', 'int64', 'bfloat16'):
    value = _per_replica(lambda i, t=dtype: tf.cast(10 * i + tf.range(3), t))
    for op, expected in ('SUM', total), ('MEAN', total / count):
      found = strategy.reduce(op, value, axis=None)
      assert found.dtype == dtype
      np.testing.assert_array_equal(tf.cast(found, tf.float64), expected)
  if count > 1:
    value = _per_replica(lambda i: tf.fill([2], i > 0))
    try:
      found = strategy.reduce('SUM', value, axis=None)
      raise AssertionError(f'a sum of bools: {found}')
    except tfs.errors.UnsupportedOptionError as e:
      assert 'bool' in str(e), e


class _Mask(layers.Layer):
  """Outputs the mask that dropout draws."""

  def __init__(self):
    super().__init__(name='mask')
    self.dropout = layers.Dropout(0.5, seed=3)

  def call(self, x, training=None):
    return self.dropout(tf.ones_like(x), training=training)


def _masks():
  """Checks that dropout masks differ between replicas and steps, with one
  shared state.

  Returns the masks of the first replica, which are the same as on one device.
  """
  mask = _Mask()
  mask(tf.ones([1, 64]))

  @tf.function
  def draw():
    strategy = tf.distribute.get_strategy()
    masks = strategy.run(lambda: mask(tf.ones([1, 64]), training=True))
    return strategy.gather(masks, 0)

  found = np.array([draw() for _ in range(3)])
  flat = found.reshape([-1, 64])
  for i in range(len(flat)):
    for j in range(i):
      # Two independent masks agree in 32 of 64 places on average (sigma 4).
      assert 12 <= np.sum(flat[i] == flat[j]) <= 52, (i, j)
  state = mask.dropout.seed_generator.state
  kept = state.numpy().astype(np.int64)
  for copy in getattr(state.value, 'values', ()):
    np.testing.assert_array_equal(kept, copy)
  copies = _gather_replicas(lambda i: tf.constant(kept))
  np.testing.assert_array_equal(copies, np.broadcast_to(kept, copies.shape))
  return found[:, 0]


def _meetings():
  """Checks that workers synchronize before `evaluate`, although some deleted models."""
  if getattr(tf.distribute.get_strategy(), 'num_workers', 1) == 1:
    return  # Replicas of one process always run together.
  x, y = common.images(8)

  def train_apart():
    optimizer = tfs.keras.LocalSteps(keras.optimizers.SGD(0.1), every=4)
    model = common.compiled(optimizer=lambda: optimizer)
    model.train_on_batch(x, y)
    return model

  models = [train_apart() for _ in range(2)]
  fits.drop_on_some(models)
  model = train_apart()

  def kernels():
    kernel = model.get_weights()[0]
    return _gather_replicas(lambda i: tf.constant(kernel))

  before = kernels()
  assert np.abs(before - before[0]).max() > 1e-6
  model.evaluate(x, y, verbose=0)
  after = kernels()
  np.testing.assert_array_equal(after, np.broadcast_to(after[0], after.shape))


PROGRAMS = {
  'predicted_in_replicas': _predicted_in_replicas,
  'slices': _slices,
  'gathered': _gathered,
  'reduced': _reduced,
  'masks': _masks,
  'meetings': _meetings,
}
