"""Data, models and results that programs share.

This module does not import `tf_strategies`.
"""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

layers, optimizers = keras.layers, keras.optimizers

BATCH = 32
CLASSES = 10
# By name: `optimizer_adam` and `recommender_adam` train with `adam`, and so on.
OPTIMIZERS = {
  'adam': lambda: optimizers.Adam(1e-2, amsgrad=True),
  'adamw': lambda: optimizers.AdamW(1e-2, weight_decay=0.1),
  'lion': lambda: optimizers.Lion(1e-2),
  'adafactor': lambda: optimizers.Adafactor(1e-2),
  'nadam': lambda: optimizers.Nadam(1e-2),
  'ftrl': lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
  'rmsprop': lambda: optimizers.RMSprop(1e-2, momentum=0.9, centered=True),
  'muon': lambda: optimizers.Muon(1e-2),
  'adamax': lambda: optimizers.Adamax(1e-2),
  'adagrad': lambda: optimizers.Adagrad(0.1),
  'adadelta': lambda: optimizers.Adadelta(1.0),
  'lamb': lambda: optimizers.Lamb(1e-2),
  'sgd_nesterov': lambda: optimizers.SGD(
    optimizers.schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01]),
    momentum=0.9,
    nesterov=True,
  ),
}
# Directory shared by all processes that run a program. None in a single
# process.
directory: str | None = None
# Models that the current program trained. The runner compares the copies of
# their variables.
trained: list[keras.Model] = []


def scope_of(strategy):
  """Returns the strategy's scope, or an empty context for one device."""
  return strategy.scope() if strategy else contextlib.nullcontext()


def run(program, strategy=None):
  """Runs a program in a strategy's scope, with a fixed seed, and returns its
  results.
  """
  keras.backend.clear_session()
  keras.utils.set_random_seed(1)
  trained.clear()
  policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
  try:
    with scope_of(strategy):
      found = program()
    # Programs that check their own results return nothing.
    return () if found is None else found
  finally:
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


def shared_directory() -> str:
  """Returns an empty directory that all processes of a strategy can access."""
  if directory is None:
    return tempfile.mkdtemp()
  path = os.path.join(directory, 'shared')
  os.makedirs(path, exist_ok=True)
  return path


def images(rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns random images and labels. All rows differ, and so do all replicas."""
  rng = np.random.default_rng(7)
  x = rng.normal(size=(rows, 8, 8, 1)).astype(np.float32)
  return x, rng.integers(0, CLASSES, rows)


def tokens(rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns token ids and labels. Rows share tokens, so gradients overlap."""
  rng = np.random.default_rng(3)
  return rng.integers(0, 23, (rows, 5)), rng.integers(0, CLASSES, rows)


class Positions(layers.Layer):
  """Adds the embeddings of tokens and positions, and passes on the mask."""

  def __init__(self, words, length, width, mask_zero=False):
    super().__init__()
    self.token = layers.Embedding(words, width, mask_zero=mask_zero)
    self.place = layers.Embedding(length, width)
    self.supports_masking = True

  def compute_mask(self, tokens, mask=None):
    return self.token.compute_mask(tokens)

  def call(self, tokens):
    places = keras.ops.arange(keras.ops.shape(tokens)[-1])
    return self.token(tokens) + self.place(places)


def linear(inputs: int, outputs: int) -> keras.Model:
  """Returns a model of one dense layer."""
  return keras.Sequential([layers.Input([inputs]), layers.Dense(outputs)])


def conv_model(*extra_layers, **conv_options) -> keras.Model:
  """Returns a convolution, max-pooling and a dense layer.

  TensorFlow cannot compute the gradient of max-pooling on a replica without
  rows.
  """
  return keras.Sequential(
    [
      layers.Input([8, 8, 1]),
      layers.Conv2D(4, 3, activation='relu', **conv_options),
      layers.MaxPooling2D(),
      *extra_layers,
      layers.Flatten(),
      layers.Dense(CLASSES, dtype='float32'),
    ]
  )


def embedding_model() -> keras.Model:
  """Returns a model of `tokens` whose table can be split into uneven parts."""
  return keras.Sequential(
    [
      layers.Input([5], dtype='int32'),
      layers.Embedding(23, 4),
      layers.Flatten(),
      layers.Dense(7, 'tanh'),
      layers.Dense(CLASSES, dtype='float32'),
    ]
  )


def momentum() -> optimizers.Optimizer:
  """Returns an optimizer with a slot, so that tests also compare its state."""
  return optimizers.SGD(0.05, momentum=0.9)


def compiled(make_model=conv_model, optimizer=momentum, **options):
  """Returns a compiled classifier."""
  model = make_model()
  defaults = {'loss': crossentropy(), 'metrics': ['accuracy']}
  model.compile(optimizer(), **{**defaults, **options})
  return model


def crossentropy(**options) -> keras.losses.Loss:
  """Returns the loss for integer labels and logits."""
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def batches(*arrays) -> tf.data.Dataset:
  """Returns batches of 32 rows of an array, or of a tuple of them."""
  arrays = arrays if len(arrays) > 1 else arrays[0]
  return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def table_rows(page: str) -> list[list[str]]:
  """Returns the cells of the rows of a page's table."""
  return [
    [cell.strip() for cell in line.strip('|').split(' | ')]
    for line in page.splitlines()
    if line.startswith('| ')
  ]


def points(seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns 78 rows of numbers (two batches, and one of 14), and three classes."""
  rng = np.random.default_rng(seed)
  return rng.random((78, 6)).astype(np.float32), rng.integers(0, 3, 78)


def descend(optimizer, tape, loss, weights) -> None:
  """Applies the gradients of a loss, as most steps of users do."""
  gradients = tape.gradient(loss, weights)
  optimizer.apply_gradients(zip(gradients, weights, strict=True))


def state_of(model) -> list:
  """Returns a model's weights and optimizer state, and registers the model."""
  trained.append(model)
  optimizer = model.optimizer
  # A step with its own optimizers does not use the one from `compile`.
  is_used = optimizer is not None and int(optimizer.iterations.numpy()) > 0
  slots = optimizer.variables if is_used else ()
  return [model.get_weights(), [v.numpy() for v in slots]]


def fit(model, x, y=None, **options) -> dict:
  """Returns the history of two epochs of `fit`, in batches of 32 rows."""
  if y is not None:
    options = {'batch_size': BATCH, **options}
  return model.fit(x, y, **{'epochs': 2, 'verbose': 0, **options}).history


def fitted(model, x, y=None, **options) -> list:
  """Returns the history of `fit`, and the model's state after it."""
  return [fit(model, x, y, **options), state_of(model)]


def results(model, x, y=None, **options) -> list:
  """Returns the results of `fit`, `evaluate` and `predict`, and the final state."""
  size = {} if y is None else {'batch_size': BATCH}
  return [
    fit(model, x, y, **options),
    model.evaluate(x, y, verbose=0, **size),
    model.predict(x, verbose=0, **size),
    state_of(model),
  ]


def train(
  model, x, y=None, optimizer='adam', loss=None, metrics=None, **options
) -> list:
  """Compiles a model and returns its `results`."""
  model.compile(optimizer, loss or crossentropy(), metrics=metrics)
  return results(model, x, y, **options)
