"""Programs that keep state between steps, or need the whole batch.

They use layers with state for each row of a batch, tables, queues, random
generators, lists, TensorFlow loops, and steps that read `x.shape[0]`.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, losses, ops = keras.layers, keras.losses, keras.ops
_ROWS = 78  # Two batches of 32, and one of 14.
_CLASSES = 4


def _points(rows=_ROWS):
  rng = np.random.default_rng(5)
  x = rng.normal(size=(rows, 6)).astype('f4')
  return x, rng.integers(0, _CLASSES, rows)


def _per_row(y, outputs):
  return losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


class _Own(keras.Model):
  """A model with a `train_step` whose loss a subclass defines."""

  def __init__(self):
    super().__init__(name=type(self).__name__.strip('_').lower())
    self.hidden, self.head = layers.Dense(8, 'tanh'), layers.Dense(_CLASSES)

  def call(self, x):
    return self.head(self.hidden(x))

  def loss_of(self, x, y):
    """Returns the loss."""
    return ops.mean(_per_row(y, self(x)))

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      loss = self.loss_of(x, y)
    common.descend(self.optimizer, tape, loss, self.trainable_weights)
    return {'value': loss, **self.after(x, y)}

  def after(self, x, y):
    """Updates state after the step, and returns additional results to report."""
    del x, y
    return {}


def _fit(model, rows=_ROWS, drop_remainder=False, **options):
  model(np.zeros([1, 6], 'f4'))
  model.compile(keras.optimizers.SGD(0.1))
  data = tf.data.Dataset.from_tensor_slices(_points(rows))
  data = data.batch(32, drop_remainder)
  return common.fitted(model, data, **options)


class _Generator(_Own):
  """Adds noise from a `tf.random.Generator`."""

  def __init__(self):
    super().__init__()
    self.random = tf.random.Generator.from_seed(3)

  def loss_of(self, x, y):
    return super().loss_of(x + 0.1 * self.random.normal(tf.shape(x)), y)


def _random_generator():
  model = _Generator()
  return _fit(model), model.random.normal([2]).numpy()


class _Table(_Own):
  """Weights each row by the loss of its class in the batch before."""

  def __init__(self):
    super().__init__()
    self.of_class = tf.lookup.experimental.MutableHashTable(
      tf.int64, tf.float32, default_value=0.0
    )

  def loss_of(self, x, y):
    return ops.mean(_per_row(y, self(x)) * (1.0 + self.of_class.lookup(y)))

  def after(self, x, y):
    found = tf.math.unsorted_segment_mean(_per_row(y, self(x)), y, _CLASSES)
    self.of_class.insert(y, tf.gather(found, y))
    return {'sum': tf.reduce_sum(self.of_class.lookup(y))}


class _Queue(_Own):
  """Contrasts rows with the rows of earlier batches, as MoCo does."""

  def __init__(self):
    super().__init__()
    self.keys = self.add_weight(shape=[40, 8], trainable=False)
    self.seen = self.add_weight(
      shape=[_CLASSES], initializer='zeros', dtype='int32', trainable=False
    )
    self.next = self.add_weight(
      shape=[], initializer='zeros', dtype='int32', trainable=False
    )

  def loss_of(self, x, y):
    alike = tf.matmul(self.hidden(x), self.keys, transpose_b=True)
    return super().loss_of(x, y) + 0.1 * ops.mean(ops.logsumexp(alike, 1))

  def after(self, x, y):
    rows = tf.shape(x)[0]
    places = (self.next + tf.range(rows)) % 40
    self.keys.value.scatter_nd_update(places[:, None], self.hidden(x))
    self.next.assign((self.next + rows) % 40)
    self.seen.value.scatter_add(tf.IndexedSlices(tf.ones_like(y, tf.int32), y))
    return {'norm': tf.norm(self.keys)}


class _Lists(_Own):
  """Keeps several outputs and their losses in a `TensorArray`."""

  def loss_of(self, x, y):
    kept = tf.TensorArray(tf.float32, 3, element_shape=[None, _CLASSES])
    means = tf.TensorArray(tf.float32, 4, clear_after_read=False).write(3, 2.0)
    for i in range(3):
      outputs = self(x) * (i + 1.0)
      kept = kept.write(i, outputs)
      means = means.write(i, ops.mean(_per_row(y, outputs)))
    # `concat` joins the rows of all outputs.
    prior = tf.reduce_mean(tf.nn.softmax(tf.stop_gradient(kept.concat())), 0)
    weighted = _per_row(y, self(x)) * tf.gather(prior, y)
    return tf.reduce_sum(means.gather([3, 0, 2])) + ops.mean(weighted)


class _ForwardMode(_Own):
  """Differentiates along a direction in forward mode."""

  def loss_of(self, x, y):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
      outputs = self(x)
    slope = ops.mean(ops.square(forward.jvp(outputs)))
    return ops.mean(_per_row(y, outputs)) + 0.1 * slope


class _SharpnessAware(_Own):
  """Computes two gradients in each step, and reports its own metrics."""

  def __init__(self):
    super().__init__()
    self.mean = keras.metrics.Mean(name='mean')
    self.right = keras.metrics.SparseCategoricalAccuracy(name='right')
    self.classes = keras.Variable(np.zeros(_CLASSES), trainable=False)

  @property
  def metrics(self):
    return [self.mean, self.right]

  def train_step(self, data):
    x, y = data
    weights = self.trainable_weights
    with tf.GradientTape() as tape:
      loss = self.loss_of(x, y)
    gradients = tape.gradient(loss, weights)
    norm = tf.linalg.global_norm(gradients) + 1e-9
    for weight, gradient in zip(weights, gradients, strict=True):
      weight.assign_add(0.05 * gradient / norm)
    with tf.GradientTape() as tape:
      sharp = self.loss_of(x, y)
    sharper = tape.gradient(sharp, weights)
    for weight, gradient in zip(weights, gradients, strict=True):
      weight.assign_sub(0.05 * gradient / norm)
    self.optimizer.apply_gradients(zip(sharper, weights, strict=True))
    self.mean.update_state(sharp)
    self.right.update_state(y, self(x))
    self.classes.assign(self.classes + ops.sum(ops.one_hot(y, _CLASSES), 0))
    return {
      'sharp': sharp,
      'mean': self.mean.result(),
      'right': self.right.result(),
      'most': ops.max(self.classes),
    }


def _sharpness_aware():
  """Trains with a last batch that has fewer rows than there are replicas."""
  model, logs_of_batches = _SharpnessAware(), []
  record = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: logs_of_batches.append(dict(logs))
  )
  return _fit(model, 66, callbacks=[record]), logs_of_batches


class _StaticLength(_Own):
  """Needs the static batch size when the step is traced."""

  def loss_of(self, x, y):
    rows = x.shape[0]
    weights = np.linspace(0.1, 1, rows).astype('f4')
    return ops.sum(_per_row(y, self(x)) * weights) / rows


class _InPython(_Own):
  """Calls Python functions whose results have no static shape."""

  def loss_of(self, x, y):
    found = _per_row(y, self(x))
    ranks = tf.numpy_function(
      lambda a: a.argsort().argsort().astype('f4'), [found], tf.float32
    )
    return ops.mean(found * ops.stop_gradient(ranks)) + tf.py_function(
      lambda a: tf.reduce_mean(a) * tf.reduce_max(a), [found], tf.float32
    )


def _captcha():
  """Trains Keras's captcha reader, whose CTC loss contains a TensorFlow loop."""
  rng = np.random.default_rng(6)
  images = rng.random((_ROWS, 8, 12, 1)).astype('f4')
  labels = rng.integers(0, 5, (_ROWS, 3))
  model = keras.Sequential(
    [
      layers.Input([8, 12, 1]),
      layers.Conv2D(4, 3, activation='tanh', padding='same'),
      layers.Permute((2, 1, 3)),
      layers.Reshape((12, 32)),
      layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
      layers.Dense(6),
    ]
  )
  return common.train(
    model,
    images,
    labels + 1,
    keras.optimizers.Adam(1e-2),
    losses.CTC(),
    shuffle=False,
    validation_split=0.2,
  )


def _stateful_rnn():
  """Trains a stateful RNN, which keeps a state for each row of the batch."""
  rng = np.random.default_rng(7)
  x = rng.normal(size=(32, 5, 4)).astype('f4')
  y = rng.normal(size=(32, 1)).astype('f4')
  model = keras.Sequential(
    [
      layers.Input(batch_shape=(8, 5, 4)),
      layers.GRU(4, stateful=True),
      layers.Dense(1),
    ]
  )
  model.compile(keras.optimizers.SGD(0.1), 'mse')
  data = (x[:16], y[:16])
  found = common.fitted(
    model, x, y, batch_size=8, shuffle=False, validation_data=data
  )
  return [
    found,
    model.predict(x, 8, verbose=0),
    model.evaluate(x, y, 8, verbose=0),
  ]


class _NumPyLayer(layers.Layer):
  """Calls Python in the middle of a model."""

  def call(self, x):
    ranks = tf.numpy_function(
      lambda a: a.argsort(0).argsort(0).astype('f4'), [x], tf.float32
    )
    return x + 0.1 * ops.stop_gradient(tf.ensure_shape(ranks, x.shape))


def _numpy_in_a_layer():
  x, y = _points()
  model = keras.Sequential(
    [layers.Input([6]), layers.Dense(4), _NumPyLayer(), layers.Dense(_CLASSES)]
  )
  return common.train(model, x, y, keras.optimizers.SGD(0.1), shuffle=False)


class _Overwritten(keras.metrics.Metric):
  """Reports the mean of the last batch, and a moving mean."""

  def __init__(self):
    super().__init__(name='overwritten')
    self.last = self.add_weight([], 'zeros', name='last')
    self.moving = self.add_weight([], 'zeros', name='moving')

  def update_state(self, y_true, y_pred, sample_weight=None):
    mean = ops.mean(y_pred)
    self.last.assign(mean)
    self.moving.assign(0.9 * self.moving + 0.1 * mean)

  def result(self):
    return {'last': self.last + 0.0, 'moving': self.moving + 0.0}


def _overwritten_metric():
  """Trains with a last batch that has fewer rows than there are replicas."""
  x, y = _points(66)
  model = common.linear(6, _CLASSES)
  optimizer, metrics = keras.optimizers.SGD(0.1), [_Overwritten()]
  return common.train(model, x, y, optimizer, metrics=metrics, shuffle=False)


PROGRAMS = {
  'captcha': _captcha,
  'stateful_rnn': _stateful_rnn,
  'random_generator': _random_generator,
  'hash_table': lambda: _fit(_Table()),
  'queue': lambda: _fit(_Queue()),
  'lists': lambda: _fit(_Lists()),
  'forward_mode': lambda: _fit(_ForwardMode()),
  'sharpness_aware_metrics': _sharpness_aware,
  'static_length': lambda: _fit(_StaticLength(), 64, drop_remainder=True),
  'numpy_in_a_layer': _numpy_in_a_layer,
  'overwritten_metric': _overwritten_metric,
  'in_python': lambda: _fit(_InPython()),
}
