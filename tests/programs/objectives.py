"""Models with their own `train_step`, or with a loss that compares rows.

They are structured like Keras's examples and guides. No program refers to a
strategy. The last batch has 14 rows.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

layers, losses, ops = keras.layers, keras.losses, keras.ops
_ROWS = 78  # Two batches of 32, and one of 14.
_CLASSES = 3


_points = functools.partial(common.points, 11)


def _net(units=_CLASSES):
  return keras.Sequential(
    [layers.Input([6]), layers.Dense(8, 'tanh'), layers.Dense(units)]
  )


# Models that learn from another model, or from similar rows.


class _Distiller(keras.Model):
  """The distiller from Keras's examples, which adds its loss in `compute_loss`."""

  def __init__(self, student, teacher):
    super().__init__(name='distiller')
    self.student, self.teacher = student, teacher

  def compile(self, optimizer, metrics, student_loss, alpha, temperature):
    super().compile(optimizer=optimizer, metrics=metrics)
    self.student_loss, self.alpha = student_loss, alpha
    self.temperature = temperature

  def compute_loss(
    self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False
  ):
    taught = ops.softmax(self.teacher(x, training=False) / self.temperature)
    told = ops.softmax(y_pred / self.temperature)
    alike = losses.KLDivergence()(taught, told) * self.temperature**2
    return self.alpha * self.student_loss(y, y_pred) + (1 - self.alpha) * alike

  def call(self, x):
    return self.student(x)


def _distillation():
  x, y = _points()
  teacher = _net()
  teacher.compile('adam', common.crossentropy(), metrics=['accuracy'])
  first = common.fitted(teacher, common.batches(x, y))
  model = _Distiller(_net(), teacher)
  model.compile(
    keras.optimizers.Adam(),
    [keras.metrics.SparseCategoricalAccuracy()],
    common.crossentropy(),
    0.1,
    10.0,
  )
  found = common.fitted(model, common.batches(x, y))
  return first, found, model.evaluate(x, y, 32, verbose=0)


class _SupervisedContrastive(losses.Loss):
  """Pulls rows of the same class together: a loss over all rows of the batch."""

  def call(self, labels, features):
    features = ops.normalize(features, axis=1)
    logits = ops.matmul(features, ops.transpose(features)) / 0.5
    labels = ops.reshape(labels, [-1, 1])
    same = ops.cast(ops.equal(labels, ops.transpose(labels)), 'float32')
    others = 1.0 - ops.eye(ops.shape(features)[0])
    same = same * others
    logits = logits - ops.stop_gradient(ops.max(logits, axis=1, keepdims=True))
    every = ops.log(ops.sum(ops.exp(logits) * others, 1, keepdims=True))
    return -ops.sum(same * (logits - every), 1) / (ops.sum(same, 1) + 1e-6)


def _supervised_contrastive():
  """Trains an encoder, then a classifier of its outputs."""
  x, y = _points()
  encoder = _net(8)
  encoder.compile(keras.optimizers.Adam(), _SupervisedContrastive())
  first = common.fitted(encoder, common.batches(x, y))
  encoder.trainable = False
  inputs = layers.Input([6])
  outputs = layers.Dense(_CLASSES, 'softmax')(encoder(inputs))
  model = keras.Model(inputs, outputs)
  model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
  return first, common.fitted(model, common.batches(x, y))


class _Distance(layers.Layer):
  """Returns the distances of two embeddings from a third."""

  def call(self, anchor, positive, negative):
    near = ops.sum(ops.square(anchor - positive), -1)
    return near, ops.sum(ops.square(anchor - negative), -1)


class _Siamese(keras.Model):
  """The Siamese network from Keras's examples, with the triplet loss."""

  def __init__(self, net):
    super().__init__(name='siamese')
    self.net = net
    self.tracker = keras.metrics.Mean(name='loss')

  def call(self, inputs):
    return self.net(inputs)

  def _loss(self, data):
    near, far = self.net(data)
    return ops.maximum(near - far + 0.5, 0.0)

  def train_step(self, data):
    with tf.GradientTape() as tape:
      loss = self._loss(data)
    gradients = tape.gradient(loss, self.net.trainable_weights)
    self.optimizer.apply_gradients(
      zip(gradients, self.net.trainable_weights, strict=True)
    )
    self.tracker.update_state(loss)
    return {'loss': self.tracker.result()}

  def test_step(self, data):
    self.tracker.update_state(self._loss(data))
    return {'loss': self.tracker.result()}

  @property
  def metrics(self):
    return [self.tracker]


def _siamese():
  x, _ = _points()
  triplet = (x, np.roll(x, 1, 0), np.roll(x, 5, 0))
  # Distances do not depend on the last bias.
  embedding = keras.Sequential(
    [layers.Dense(8, 'tanh'), layers.Dense(4, use_bias=False)]
  )
  inputs = [layers.Input([6]) for _ in range(3)]
  net = keras.Model(inputs, _Distance()(*[embedding(i) for i in inputs]))
  model = _Siamese(net)
  model.compile(keras.optimizers.Adam(1e-2), weighted_metrics=[])
  data = common.batches(*triplet)
  return common.fitted(model, data, validation_data=data), model.predict(
    tf.data.Dataset.zip((data,)), verbose=0
  )


class _Retrieval(keras.Model):
  """A two-tower model. The other rows of a batch serve as negatives."""

  def __init__(self):
    super().__init__(name='retrieval')
    self.users, self.items = (
      keras.Sequential([layers.Embedding(n, 8), layers.Dense(4)])
      for n in (10, 20)
    )
    self.loss_fn = losses.CategoricalCrossentropy(
      from_logits=True, reduction='sum'
    )
    self.top = keras.metrics.TopKCategoricalAccuracy(3, name='top_3')

  def call(self, data):
    return self.users(data['user']), self.items(data['item'])

  def train_step(self, data):
    with tf.GradientTape() as tape:
      users, items = self(data, training=True)
      scores = ops.matmul(users, ops.transpose(items))
      chosen = ops.eye(ops.shape(scores)[0])
      # A row with the same item is not a negative.
      twice = ops.equal(data['item'][:, None], data['item'][None])
      scores += (ops.cast(twice, 'float32') - chosen) * -1e4
      loss = self.loss_fn(chosen, scores)
    common.descend(self.optimizer, tape, loss, self.trainable_variables)
    self.top.update_state(chosen, scores)
    return {'loss': loss, 'top_3': self.top.result()}


def _two_towers():
  rng = np.random.default_rng(13)
  data = {
    'user': rng.integers(0, 10, _ROWS),
    'item': rng.integers(0, 20, _ROWS),
  }
  model = _Retrieval()
  model.compile(keras.optimizers.Adagrad(0.1))
  return common.fitted(model, common.batches(data))


# Steps that modify gradients.


class _Own(keras.Model):
  """A `train_step` with a hook for gradients."""

  def __init__(self):
    super().__init__(name='own')
    self.net = _net()

  def call(self, x):
    return self.net(x)

  def gradients(self, x, y):
    with tf.GradientTape() as tape:
      outputs = self(x, training=True)
      loss = self.compute_loss(x, y, outputs)
    return tape.gradient(loss, self.trainable_variables), loss, outputs

  def changed_gradients(self, x, y):
    return self.gradients(x, y)

  def train_step(self, data):
    x, y = data
    gradients, loss, outputs = self.changed_gradients(x, y)
    self.optimizer.apply_gradients(
      zip(gradients, self.trainable_variables, strict=True)
    )
    for metric in self.metrics:
      if metric.name == 'loss':
        metric.update_state(loss, sample_weight=tf.shape(x)[0])
      else:
        metric.update_state(y, outputs)
    return {m.name: m.result() for m in self.metrics}


class _Clipping(_Own):
  def changed_gradients(self, x, y):
    gradients, loss, outputs = self.gradients(x, y)
    gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
    gradients = [tf.clip_by_norm(g, norm) for g in gradients]
    return gradients, loss, outputs


class _Compiled(_Own):
  """The same, with a step that is a tf.function."""

  @tf.function
  def train_step(self, data):
    return super().train_step(data)


class _Looping(_Own):
  """A model that contains a TensorFlow loop, through which gradients flow."""

  def call(self, x):
    def turn(i, state):
      return i + 1, 0.5 * state + 0.1 * tf.tanh(self.net.layers[0](x))

    start = tf.zeros([tf.shape(x)[0], 8])
    _, state = tf.while_loop(lambda i, _: i < 3, turn, [0, start])
    return self.net.layers[-1](state)


def _own(build):
  def program():
    x, y = _points()
    model = build()
    optimizer = keras.optimizers.Adam(1e-2)
    model.compile(optimizer, common.crossentropy(), metrics=['accuracy'])
    found = common.fitted(
      model, common.batches(x, y), validation_data=common.batches(x, y)
    )
    return found, model.predict(x, batch_size=32, verbose=0)

  return program


def _step_of_instance():
  """Replaces the model's `train_step` method by a function of any batch."""
  x, y = _points()
  model = _net()
  optimizer = keras.optimizers.Adam(1e-2)
  loss_fn = common.crossentropy()

  def step(data):
    half, other, _, y = data
    with tf.GradientTape() as tape:
      loss = loss_fn(y, model(half + other, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return {'loss': loss}

  model.train_step = step
  model.compile(optimizer)
  return common.fitted(model, common.batches(x / 2, x / 2, y, y))


PROGRAMS = {
  'siamese': _siamese,
  'distillation': _distillation,
  'supervised_contrastive': _supervised_contrastive,
  'two_towers': _two_towers,
  'clipped_by_hand': _own(_Clipping),
  'compiled_step': _own(_Compiled),
  'loop_in_model': _own(_Looping),
  'step_of_instance': _step_of_instance,
}
