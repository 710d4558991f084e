"""What tests of divided optimizer state train: models, optimizers, runs of them."""

import keras
import numpy as np
import tensorflow as tf

optimizers = keras.optimizers

# Rows of a batch, which no 2, 3 or 4 replicas share evenly, and batches.
BATCH, STEPS = 13, 4


def dense_model() -> keras.Model:
  """Lengths that 2 and 3 do not divide; some slots are too short to divide."""
  return keras.Sequential(
    [
      keras.Input([7]),
      keras.layers.Dense(33, activation='tanh'),
      keras.layers.Dense(65, activation='tanh'),
      keras.layers.Dense(1),
    ]
  )


def embedding_model() -> keras.Model:
  """Its gradient is of some rows, of which many occur twice."""
  return keras.Sequential(
    [
      keras.Input([3], dtype='int32'),
      keras.layers.Embedding(31, 11),
      keras.layers.Flatten(),
      keras.layers.Dense(1),
    ]
  )


def realistic_model() -> keras.Model:
  """The shapes of a small network for images, with a table of categories."""
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
  """Rows and targets of `dense_model`."""
  rng = np.random.default_rng(5)
  x = rng.normal(size=[rows, 7]).astype('float32')
  return x, rng.normal(size=[rows, 1]).astype('float32')


def words(rows: int = BATCH * STEPS):
  """Rows and targets of `embedding_model`."""
  rng = np.random.default_rng(6)
  x = rng.integers(0, 31, [rows, 3]).astype('int32')
  return x, rng.normal(size=[rows, 1]).astype('float32')


def pictures(rows: int = 16):
  """Rows and targets of `realistic_model`."""
  rng = np.random.default_rng(7)
  x = rng.normal(size=[rows, 8, 8, 3]).astype('float32')
  y = rng.normal(size=[rows, 10]).astype('float32')
  return [x, rng.integers(0, 1000, [rows, 2]).astype('int32')], y


# By name: makes an optimizer, and whether the rows are words.
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
  # With Keras's epsilon of 1e-7 the rounding of a gradient near zero is its sign.
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
  """The model after a `fit` that shuffles nothing."""
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
  """Weights, and all that the optimizer keeps; on several workers a collective."""
  kept = [np.array(v.numpy()) for v in model.optimizer.variables]
  return model.get_weights(), kept


def stored_bytes(model) -> tuple[int, int]:
  """Bytes of the optimizer's variables in this process, and those of the whole."""
  stored = whole = 0
  for variable in model.optimizer.variables:
    value = variable.value
    copies = getattr(value, 'values', [value])
    # What lies behind the handles, not what the variables say of themselves.
    stored += sum(copy.read_value().numpy().nbytes for copy in copies)
    whole += int(np.prod(variable.shape)) * value.dtype.size
  return stored, whole
