"""Every kind of data that Keras accepts gives the same results as on one device.

The programs use generators, data sets and arrays of every structure. Each also
returns the batches that it read.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers = keras.layers
_ROWS = 72  # Two batches of 32, and one of 8.


def _two_inputs(rows=_ROWS):
  rng = np.random.default_rng(5)
  a = rng.normal(size=(rows, 3)).astype('f4')
  b = rng.normal(size=(rows, 2)).astype('f4')
  return a, b, (a.sum(1) - b.sum(1)).astype('f4')


def _model(*inputs):
  """Returns a compiled dense model with named inputs."""
  joined = layers.Concatenate()(list(inputs)) if len(inputs) > 1 else inputs[0]
  model = keras.Model(list(inputs), layers.Dense(1)(joined))
  model.compile(keras.optimizers.SGD(0.05), 'mse', metrics=['mae'])
  return model


def _two_input_model():
  return _model(layers.Input([3], name='a'), layers.Input([2], name='b'))


def _one_input_model():
  return _model(layers.Input([3], name='a'))


class _Batches(keras.utils.PyDataset):
  """A dataset whose last batch is small."""

  def __init__(self, **options):
    super().__init__(**options)
    self._a, _, self._y = _two_inputs()

  def __len__(self):
    return 3

  def __getitem__(self, i):
    rows = slice(32 * i, 32 * i + 32)
    return self._a[rows], self._y[rows]


def _finite_generator():
  a, _, y = _two_inputs(192)
  drawn = []

  def batches():
    for i in range(6):
      drawn.append(i)
      yield a[32 * i : 32 * i + 32], y[32 * i : 32 * i + 32]

  return common.fitted(_one_input_model(), batches(), epochs=1), drawn


def _endless_generator():
  a, _, y = _two_inputs(32)

  def batches():
    i = 0
    while True:
      yield a + np.float32(i), y
      i += 1

  return common.fitted(_one_input_model(), batches(), steps_per_epoch=3)


def _seeded_shuffle():
  a, _, y = _two_inputs()
  dataset = tf.data.Dataset.from_tensor_slices((a, y))
  dataset = dataset.shuffle(_ROWS, seed=3).batch(32)
  model = _one_input_model()
  return common.fitted(model, dataset, epochs=3, validation_data=dataset)


def _py_dataset():
  batches = _Batches()
  return common.results(_one_input_model(), batches, validation_data=batches)


def _structures():
  """Runs `fit`, `evaluate` and `predict` with each structure of two inputs."""
  a, b, y = _two_inputs()
  model = _two_input_model()
  found = {}
  inputs = {
    'list': [a, b],
    'tuple': (a, b),
    'dict': {'a': a, 'b': b},
  }
  for name, x in inputs.items():
    found[f'fit {name}'] = model.fit(
      x, y, batch_size=32, shuffle=False, verbose=0
    ).history['loss']
    found[f'evaluate {name}'] = model.evaluate(x, y, batch_size=32, verbose=0)
    found[f'predict {name}'] = model.predict(x, batch_size=32, verbose=0)
  slices = tf.data.Dataset.from_tensor_slices
  elements = {
    'pair alone': ((a, b),),
    'dict alone': {'a': a, 'b': b},
    'dict in a tuple': ({'a': a, 'b': b},),
    'with targets': ((a, b), y),
    'with weights': ((a, b), y, np.linspace(0, 1, _ROWS).astype('f4')),
  }
  for name, element in elements.items():
    dataset = slices(element).batch(32)
    found[f'predict dataset, {name}'] = model.predict(dataset, verbose=0)
    if 'with' in name:
      found[f'evaluate dataset, {name}'] = model.evaluate(dataset, verbose=0)
  return found, (model.get_weights(),)


def _on_batch():
  a, b, y = _two_inputs(34)
  weights = np.linspace(0, 2, 34).astype('f4')
  model = _two_input_model()
  found = {
    'train': [model.train_on_batch([a, b], y) for _ in range(3)],
    'by name': model.train_on_batch([a[:8], b[:8]], y[:8], return_dict=True),
    'weighted': model.train_on_batch([a, b], y, sample_weight=weights),
    'test': model.test_on_batch((a, b), y),
    'predict': model.predict_on_batch([a, b]),
    'fewer rows than replicas': model.predict_on_batch([a[:2], b[:2]]),
  }
  return found, (model.get_weights(),)


class _Denoiser(keras.Model):
  """A model with its own `train_step`, for inputs without targets."""

  def __init__(self):
    super().__init__(name='denoiser')
    self.dense = layers.Dense(3)
    self.tracker = keras.metrics.Mean(name='loss')

  @property
  def metrics(self):
    return [self.tracker]

  def call(self, x):
    return self.dense(x)

  def train_step(self, data):
    with tf.GradientTape() as tape:
      loss = self.compiled(data, self(2.0 * data, training=True))
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply(gradients, self.trainable_variables)
    self.tracker.update_state(loss)
    return {'loss': self.tracker.result()}

  def compile(self, optimizer, loss):
    super().compile(optimizer=optimizer)
    self.compiled = loss


def _inputs_alone():
  a, _, _ = _two_inputs(96)
  model = _Denoiser()
  model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
  return common.fitted(model, common.batches(a))


def _bools_and_strings():
  rng = np.random.default_rng(2)
  names = np.array(['red', 'green', 'blue'])[rng.integers(0, 3, _ROWS)]
  flags = rng.integers(0, 2, (_ROWS, 1)).astype(bool)
  labels = rng.integers(0, 2, _ROWS).astype(bool)
  name = layers.Input([], dtype='string', name='name')
  flag = layers.Input([1], dtype='bool', name='flag')
  lookup = layers.StringLookup(
    vocabulary=['red', 'green', 'blue'], output_mode='one_hot'
  )
  joined = layers.Concatenate()([lookup(name), keras.ops.cast(flag, 'float32')])
  model = keras.Model([name, flag], layers.Dense(1, 'sigmoid')(joined))
  model.compile(keras.optimizers.SGD(0.1), 'binary_crossentropy')
  dataset = tf.data.Dataset.from_tensor_slices(
    ({'name': names, 'flag': flags}, labels)
  )
  return common.fitted(model, dataset.batch(32))


PROGRAMS = {
  'inputs_alone': _inputs_alone,
  'finite_generator': _finite_generator,
  'endless_generator': _endless_generator,
  'seeded_shuffle': _seeded_shuffle,
  'py_dataset': _py_dataset,
  'structures': _structures,
  'on_batch': _on_batch,
  'bools_and_strings': _bools_and_strings,
}
