"""Training loops whose step is written for one device.

Each program creates its models and optimizers. It returns the step, the
optimizers and the variables to compare.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

_EPOCHS = 2


def _data(rows):
  rng = np.random.default_rng(7)
  x = rng.normal(size=(rows, 8, 8, 1)).astype(np.float32)
  return tf.data.Dataset.from_tensor_slices((x, rng.integers(0, 10, rows)))


def conv_model(*extra_layers) -> keras.Model:
  """Returns a small image network with logits for ten classes."""
  layers = keras.layers
  return keras.Sequential(
    [
      layers.Input([8, 8, 1]),
      layers.Conv2D(4, 3, activation='relu'),
      layers.MaxPooling2D(),
      *extra_layers,
      layers.Flatten(),
      layers.Dense(10, dtype='float32'),
    ]
  )


def _momentum():
  return keras.optimizers.SGD(0.05, momentum=0.9)


def _losses(model, x, y):
  logits = model(x, training=True)
  return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)


def _classifier(model, optimizer, loss_of=tf.reduce_mean):
  """Returns the step of a classifier that also updates an accuracy metric."""
  accuracy = keras.metrics.SparseCategoricalAccuracy()

  def step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
      logits = model(x, training=True)
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=y, logits=logits
      )
      loss = loss_of(losses)
      scaled = optimizer.scale_loss(loss)
    accuracy.update_state(y, logits)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(scaled, weights), weights)
    return {'loss': loss, 'accuracy': accuracy.result(), 'nothing': None}

  return step, [optimizer], model.variables


def mean():
  """Returns a step that minimizes the mean over the batch."""
  return _classifier(conv_model(), _momentum())


def clipped_and_accumulated():
  """Returns a step whose optimizer must see the gradients of the whole batch."""
  optimizer = keras.optimizers.Adam(
    1e-2, gradient_accumulation_steps=2, global_clipnorm=0.05
  )
  return _classifier(conv_model(), optimizer)


def normalised():
  """Returns a step with statistics and dropout masks of the whole batch."""
  model = conv_model(
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
  )
  return _classifier(model, _momentum())


def branching():
  """Returns a step with a condition on the loss, which AutoGraph converts."""

  def loss_of(losses):
    loss = tf.reduce_max(losses)
    if loss > 3.0:
      loss = tf.reduce_mean(losses)
    return loss

  return _classifier(conv_model(), _momentum(), loss_of)


def compiled_penalty():
  """Returns a compiled step that adds the norm of the gradient to the loss."""
  model, optimizer = conv_model(), _momentum()

  @tf.function
  def step(batch):
    x, y = batch
    weights = model.trainable_variables
    with tf.GradientTape() as outer:
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(_losses(model, x, y))
      gradients = tape.gradient(loss, weights)
      total = loss + 0.1 * tf.linalg.global_norm(gradients)
    optimizer.apply(outer.gradient(total, weights), weights)
    return total

  return step, [optimizer], model.variables


PROGRAMS = (
  mean,
  clipped_and_accumulated,
  normalised,
  branching,
  compiled_penalty,
)


def run(program, strategy=None, rows=69, in_function=False):
  """Returns the variables and the results of all steps.

  By default there are two full batches of 32 rows and one of 5. With
  `in_function`, a `tf.function` draws the batches.
  """
  keras.backend.clear_session()
  keras.utils.set_random_seed(11)
  with strategy.scope() if strategy else contextlib.nullcontext():
    step, optimizers, variables = program()
  data = _data(rows).batch(32)
  if strategy is None:
    step = tf.function(step, reduce_retracing=True)
  else:
    step = strategy.step(step, optimizers)
    data = strategy.experimental_distribute_dataset(data)
  results = []
  if in_function:
    step_on = tf.function(lambda batches: step(next(batches)))
    for _ in range(_EPOCHS):
      batches = iter(data)
      results += [step_on(batches) for _ in range(-(-rows // 32))]
  else:
    for _ in range(_EPOCHS):
      results += [step(batch) for batch in data]
  found = [np.asarray(v) for v in tf.nest.flatten(results) if v is not None]
  return [v.numpy() for v in variables], found
