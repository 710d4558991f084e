"""Models with a dynamic or a static table, which must give the same results."""

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs

WIDTH = 4
VOCABULARY = 6
_BATCH = 8
STEPS = 5

optimizers = keras.optimizers
OPTIMIZERS = {
  'sgd': lambda: optimizers.SGD(0.1),
  'momentum': lambda: optimizers.SGD(0.1, momentum=0.9),
  'nesterov': lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
  'adagrad': lambda: optimizers.Adagrad(0.1),
  'adam': lambda: optimizers.Adam(0.1),
  'amsgrad': lambda: optimizers.Adam(0.1, amsgrad=True),
  'clipnorm': lambda: optimizers.Adam(0.1, clipnorm=0.1),
  'schedule': lambda: optimizers.Adam(
    optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
  ),
  'rmsprop': lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
  'adadelta': lambda: optimizers.Adadelta(0.1),
  'adamax': lambda: optimizers.Adamax(0.1),
  'nadam': lambda: optimizers.Nadam(0.1),
  'ftrl': lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
  'lion': lambda: optimizers.Lion(0.01),
}


@keras.saving.register_keras_serializable('tf_strategies.tests')
def first_rows(ids):
  """Returns initial rows that differ by id and column."""
  places = tf.cast(tf.cast(ids, tf.int64) % 1009, tf.float32)
  return tf.sin(places[:, None] * tf.constant([1.0, 2.0, 3.0, 4.0]) + 1.0)


@keras.saving.register_keras_serializable('tf_strategies.tests')
class Pooling(keras.layers.Layer):
  """Sums the rows of any number of ids."""

  def call(self, x):
    return tf.reduce_sum(x, 1)

  def compute_output_shape(self, shape):
    return shape[0], shape[2]


def _table(is_dynamic):
  if is_dynamic:
    return tfs.keras.DynamicEmbedding(WIDTH, first_rows)
  return keras.layers.Embedding(
    VOCABULARY,
    WIDTH,
    embeddings_initializer=lambda shape, dtype: first_rows(tf.range(shape[0])),
  )


def model(is_dynamic, optimizer, kind='dense', **options):
  """Returns a compiled model with two ids per row and fixed initial weights.

  With `kind` 'ragged' a row has up to two ids; with 'sparse' some ids are
  missing.
  """
  layers = keras.layers
  embedding = _table(is_dynamic)
  dense = layers.Dense(
    1, kernel_initializer=keras.initializers.RandomUniform(seed=3)
  )
  ids = keras.Input(
    [None if kind == 'ragged' else 2],
    dtype='int64',
    sparse=kind == 'sparse',
    ragged=kind == 'ragged',
  )
  pooling = Pooling() if kind == 'ragged' else layers.Flatten()
  found = keras.Sequential([ids, embedding, pooling, dense])
  found.compile(optimizer(), 'mse', **options)
  return found


def some_in_each_batch():
  """Returns ids and targets of some steps. Some ids repeat."""
  rng = np.random.default_rng(1)
  ids = rng.integers(0, VOCABULARY, [STEPS * _BATCH, 2])
  return ids, rng.normal(size=[STEPS * _BATCH, 1]).astype(np.float32)


def all_in_each_batch():
  """Returns the same, but each batch contains all ids."""
  ids, y = some_in_each_batch()
  for batch in range(0, len(ids), _BATCH):
    ids[batch : batch + VOCABULARY // 2] = np.arange(VOCABULARY).reshape(
      [-1, 2]
    )
  return ids, y


def with_gaps(kind, x):
  """Removes some ids, but none that `all_in_each_batch` adds."""
  row, column = np.indices(x.shape)
  kept = (row % _BATCH < VOCABULARY // 2) | ((row + column) % 3 > 0)
  if kind == 'ragged':
    return tf.RaggedTensor.from_row_lengths(x[kept], kept.sum(1))
  return tf.SparseTensor(np.argwhere(kept), x[kept], x.shape)


def dataset(x, y):
  """Returns batches of a fixed size."""
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH)


def results(model, x, y, epochs=2, **options):
  """Trains a model and returns its losses, its evaluation and its predictions."""
  history = model.fit(dataset(x, y), epochs=epochs, verbose=0, **options)
  return {
    'losses': history.history['loss'],
    'evaluation': model.evaluate(dataset(x, y), verbose=0),
    'predictions': model.predict(dataset(x, y), verbose=0),
  }


def twice(is_dynamic):
  """Returns a layer, an optimizer and a step that reads the layer's rows twice."""
  layer = _table(is_dynamic)
  layer.build([None])
  optimizer = optimizers.Adagrad(0.1)
  optimizer.build(layer.trainable_variables)

  def step(batch):
    (first, second), y = batch
    with tf.GradientTape() as tape:
      products = tf.reduce_sum(layer(first) * layer(second), -1)
      loss = tf.reduce_mean(tf.square(products - y))
    variables = layer.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss

  return layer, optimizer, step


def pairs():
  """Returns batches for `twice`."""
  ids, y = some_in_each_batch()
  return [
    ((ids[i : i + _BATCH, 0], ids[i : i + _BATCH, 1]), y[i : i + _BATCH, 0])
    for i in range(0, len(ids), _BATCH)
  ]
