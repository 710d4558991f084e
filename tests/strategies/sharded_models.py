"""Models, optimizers and training runs for tests of sharded optimizer state."""

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


def large_model() -> keras.Model:
  """Returns a model whose padded pieces and small slots hardly count."""
  return keras.Sequential(
    [keras.Input([7]), keras.layers.Dense(2048), keras.layers.Dense(129)]
  )


def numbers():
  """Returns the inputs and targets of `dense_model`."""
  rng, rows = np.random.default_rng(5), BATCH * STEPS
  x = rng.normal(size=[rows, 7]).astype('float32')
  return x, rng.normal(size=[rows, 1]).astype('float32')


OPTIMIZERS = {
  'plain': lambda: optimizers.Adam(0.01),
  'adam': lambda: optimizers.Adam(0.01, amsgrad=True),
  'adafactor': lambda: optimizers.Adafactor(0.01),
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
