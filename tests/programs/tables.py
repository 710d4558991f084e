"""Models that convert table columns and texts to numbers.

They are structured like Keras's examples. No program refers to a strategy. The
last batch has 14 rows.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, losses = keras.layers, keras.losses
_ROWS = 78  # Two batches of 32, and one of 14.


def _table():
  rng = np.random.default_rng(16)
  return {
    'age': rng.normal(40, 10, _ROWS).astype('f4'),
    'kind': rng.integers(0, 5, _ROWS),
    'colour': np.array(['red', 'green', 'blue', 'none'])[
      rng.integers(0, 4, _ROWS)
    ],
    'size': rng.random(_ROWS).astype('f4'),
  }, rng.integers(0, 2, _ROWS)


def _structured_data():
  """Trains Keras's structured-data example, with one encoder for each column."""
  table, y = _table()
  dataset = common.batches(table, y)
  age = layers.Normalization(axis=None)
  age.adapt(table['age'])
  kind = layers.IntegerLookup(output_mode='int')
  kind.adapt(table['kind'])
  colour = layers.StringLookup(output_mode='one_hot')
  colour.adapt(table['colour'][:60])
  inputs = {
    'age': layers.Input([1], name='age'),
    'kind': layers.Input([1], name='kind', dtype='int64'),
    'colour': layers.Input([1], name='colour', dtype='string'),
    'size': layers.Input([1], name='size'),
  }
  found = [
    age(inputs['age']),
    layers.CategoryEncoding(kind.vocabulary_size(), 'multi_hot')(
      kind(inputs['kind'])
    ),
    colour(inputs['colour']),
    layers.Flatten()(
      layers.Embedding(8, 3)(layers.Hashing(8)(inputs['colour']))
    ),
    layers.Discretization([0.2, 0.5], output_mode='one_hot')(inputs['size']),
  ]
  hidden = layers.Dense(8, 'relu')(layers.Concatenate()(found))
  outputs = layers.Dense(1, 'sigmoid')(layers.Dropout(0.5)(hidden))
  model = keras.Model(inputs, outputs)
  return common.train(
    model,
    dataset,
    loss='binary_crossentropy',
    metrics=['accuracy'],
    validation_data=dataset,
  )


def _feature_space():
  table, y = _table()
  dataset = common.batches(table, y)
  utils = keras.utils.FeatureSpace
  space = utils(
    features={
      'age': utils.float_normalized(),
      'kind': utils.integer_categorical(num_oov_indices=0),
      'colour': utils.string_categorical(),
      'size': utils.float_discretized(num_bins=4),
    },
    crosses=[utils.cross(('colour', 'kind'), crossing_dim=8)],
    output_mode='concat',
  )
  space.adapt(dataset.map(lambda x, _: x))
  hidden = layers.Dense(8, 'relu')(space.get_encoded_features())
  outputs = layers.Dense(1, 'sigmoid')(hidden)
  training = keras.Model(space.get_encoded_features(), outputs)
  training.compile('adam', 'binary_crossentropy', metrics=['accuracy'])
  inference = keras.Model(space.get_inputs(), outputs)
  prepared = dataset.map(lambda x, y: (space(x), y)).prefetch(1)
  found = common.fitted(training, prepared)
  one = {k: v[:5] for k, v in table.items()}
  one = {k: tf.convert_to_tensor(v) for k, v in one.items()}
  return found, inference.predict(one, verbose=0)


def _text_vectorization():
  """Trains an end-to-end text model whose vocabulary is applied inside the model."""
  words = np.array(['the', 'cat', 'sat', 'on', 'a', 'mat', 'far', 'away'])
  rng = np.random.default_rng(17)
  texts = np.array(
    [' '.join(words[rng.integers(0, 8, n)]) for n in rng.integers(1, 7, _ROWS)]
  )
  y = np.char.count(texts, 'cat') > 0
  vectorize = layers.TextVectorization(12, output_sequence_length=6)
  vectorize.adapt(texts[:50])
  model = keras.Sequential(
    [
      layers.Input([1], dtype='string'),
      vectorize,
      layers.Embedding(12, 8),
      layers.Conv1D(8, 3, activation='relu'),
      layers.GlobalMaxPooling1D(),
      layers.Dense(1, 'sigmoid'),
    ]
  )
  dataset = common.batches(texts[:, None], y)
  loss = 'binary_crossentropy'
  return common.train(model, dataset, loss=loss, metrics=['accuracy'])


def _ragged_batches():
  rng = np.random.default_rng(18)
  lengths = rng.integers(1, 7, _ROWS)
  texts = tf.RaggedTensor.from_row_lengths(
    rng.integers(1, 9, lengths.sum()), lengths
  )
  return common.batches(texts, lengths > 3)


def _ragged(read=lambda make: make()):
  """Trains on a ragged tensor of texts."""
  inputs = layers.Input([None], dtype='int64', ragged=True)
  hidden = layers.Lambda(
    lambda t: t.to_tensor(shape=[None, 6]), output_shape=(6,)
  )(inputs)
  hidden = layers.Embedding(9, 4, mask_zero=True)(hidden)
  outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden))
  model = keras.Model(inputs, outputs)
  loss = losses.BinaryCrossentropy(from_logits=True)
  return common.train(model, read(_ragged_batches), loss=loss)


def _sparse_batches():
  counts = np.random.default_rng(19).integers(0, 5, (_ROWS, 10)) // 3
  sparse = tf.sparse.from_dense(counts.astype('f4'))
  return common.batches(sparse, counts.sum(1) > 3)


def _sparse(read=lambda make: make()):
  """Trains on a bag of words as a sparse tensor."""
  inputs = layers.Input([10], sparse=True)
  outputs = layers.Dense(1)(layers.Dense(4, 'relu')(inputs))
  model = keras.Model(inputs, outputs)
  loss = losses.BinaryCrossentropy(from_logits=True)
  return common.train(model, read(_sparse_batches), loss=loss)


def _by_workers(make):
  """Returns data sets that each worker reads itself."""
  if not tf.distribute.has_strategy():
    return make()
  strategy = tf.distribute.get_strategy()
  return strategy.distribute_datasets_from_function(lambda context: make())


PROGRAMS = {
  'structured_data': _structured_data,
  'feature_space': _feature_space,
  'text_vectorization': _text_vectorization,
  'ragged': _ragged,
  'sparse': _sparse,
}
# Each worker reads all rows here.
BY_WORKERS = {
  'ragged_by_workers': lambda: _ragged(_by_workers),
  'sparse_by_workers': lambda: _sparse(_by_workers),
}
