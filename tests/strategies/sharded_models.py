"""Models, optimizers and training runs for tests of divided optimizer state."""

import keras
import numpy as np
import tensorflow as tf

optimizers = keras.optimizers

# Rows in a batch, which 2, 3 or 4 replicas cannot share evenly. Number of
# batches.
BATCH, STEPS = 13, 4


def dense_model() -> keras.Model:
  """Returns a model whose slots 2 and 3 do not divide, or are too short to divide."""
  return keras.Sequential(
    [
      keras.Input([7]),
      keras.layers.Dense(33, activation='tanh'),
      keras.layers.Dense(65, activation='tanh'),
      keras.layers.Dense(1),
    ]
  )


def embedding_model() -> keras.Model:
  """Returns a model whose gradient contains many rows twice."""
  return keras.Sequential(
    [
      keras.Input([3], dtype='int32'),
      keras.layers.Embedding(31, 11),
      keras.layers.Flatten(),
      keras.layers.Dense(1),
    ]
  )


def realistic_model() -> keras.Model:
  """Returns a small image network with an embedding of categories."""
  image = keras.Input([8, 8, 3])
  category = keras.Input([2], dtype='int32')
  y = keras.layers.Conv2D(64, 3, padding='same', activation='relu')(image)
  y = keras.layers.Conv2D(64, 3, padding='same')(y)
  y = keras.layers.BatchNormalization()(y)
  y = keras.layers.Conv2D(128, 3, strides=2, padding='same')(y)
  y = keras.layers.GlobalAveragePooling2D()(y)
  z = keras.layers.Flatten()(keras.layers.Embedding(1000, 32)(category))
  y = keras.layers.Concatenate()([y, z])
  y = keras.layers.Dense(512, activation='relu')(y)
  return keras.Model([image, category], keras.layers.Dense(10)(y))


def numbers(rows: int = BATCH * STEPS):
  """Returns the inputs and targets of `dense_model`."""
  rng = np.random.default_rng(5)
  x = rng.normal(size=[rows, 7]).astype('float32')
  return x, rng.normal(size=[rows, 1]).astype('float32')


def words(rows: int = BATCH * STEPS):
  """Returns the inputs and targets of `embedding_model`."""
  rng = np.random.default_rng(6)
  x = rng.integers(0, 31, [rows, 3]).astype('int32')
  return x, rng.normal(size=[rows, 1]).astype('float32')


def pictures(rows: int = 16):
  """Returns the inputs and targets of `realistic_model`."""
  rng = np.random.default_rng(7)
  x = rng.normal(size=[rows, 8, 8, 3]).astype('float32')
  y = rng.normal(size=[rows, 10]).astype('float32')
  return [x, rng.integers(0, 1000, [rows, 2]).astype('int32')], y


# Name: (function that makes the optimizer, whether the inputs are words).
OPTIMIZERS = {
  'momentum': lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
  'adam': lambda: optimizers.Adam(0.01, amsgrad=True),
  'adamw': lambda: optimizers.AdamW(0.01, weight_decay=0.1),
  'rmsprop': lambda: optimizers.RMSprop(0.01, momentum=0.9, epsilon=1e-4),
  'adagrad': lambda: optimizers.Adagrad(0.05),
  'adadelta': lambda: optimizers.Adadelta(0.5),
  'adamax': lambda: optimizers.Adamax(0.01),
  'nadam': lambda: optimizers.Nadam(0.01),
  'lion': lambda: optimizers.Lion(0.001),
  'ftrl': lambda: optimizers.Ftrl(0.1),
  'lamb': lambda: optimizers.Lamb(0.01),
  'adafactor': lambda: optimizers.Adafactor(0.01),
  'muon': lambda: optimizers.Muon(0.01),
}
OPTIONS = {
  'plain': lambda: optimizers.Adam(0.01),
  'global_clipnorm': lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
  'clipnorm': lambda: optimizers.Adam(0.01, clipnorm=0.1),
  'clipvalue': lambda: optimizers.Adam(0.01, clipvalue=0.01),
  'accumulation': lambda: optimizers.Adam(
    0.01, gradient_accumulation_steps=2, global_clipnorm=0.1
  ),
  # With Keras's epsilon of 1e-7, the update for a gradient near zero would be
  # the sign of its rounding error.
  'ema': lambda: optimizers.Adam(
    0.01,
    epsilon=1e-4,
    use_ema=True,
    ema_momentum=0.9,
    ema_overwrite_frequency=3,
  ),
  'weight_decay': lambda: optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1),
  'loss_scale': lambda: optimizers.LossScaleOptimizer(
    optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1),
    initial_scale=8.0,
    dynamic_growth_steps=2,
  ),
}


def train(optimizer, strategy=None, data=numbers, model=dense_model, **fit):
  """Returns the model after a `fit` without shuffling."""
  strategy = tf.distribute.get_strategy() if strategy is None else strategy
  keras.utils.set_random_seed(3)
  with strategy.scope():
    made = model()
    made.compile(optimizer(), 'mse')
  x, y = data()
  options = {'batch_size': BATCH, 'epochs': 1, **fit}
  made.fit(x, y, shuffle=False, verbose=0, **options)
  return made


def state(model) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the weights and the optimizer's state.

  On several workers all must call it.
  """
  kept = [np.array(v.numpy()) for v in model.optimizer.variables]
  return model.get_weights(), kept


def stored_bytes(model) -> tuple[int, int]:
  """Returns the bytes of optimizer state in this process, and in total."""
  stored = whole = 0
  for variable in model.optimizer.variables:
    value = variable.value
    copies = getattr(value, 'values', [value])
    # Reads the stored values, not the shapes that the variables report.
    stored += sum(copy.read_value().numpy().nbytes for copy in copies)
    whole += int(np.prod(variable.shape)) * value.dtype.size
  return stored, whole
