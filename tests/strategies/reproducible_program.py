"""A training run that gives the same bits on any number of replicas."""

import contextlib
import hashlib
import os
import time

import keras
import numpy as np
import tensorflow as tf

ROWS = 69  # Batches of 32, 32 and 5 rows: some shards of the last have none.
BATCH = 32
STEPS = -(-ROWS // BATCH)
EPOCHS = 2


def data():
  """Returns images, words and labels of ten classes. All rows differ."""
  rng = np.random.default_rng(3)
  images = rng.normal(size=(ROWS, 6, 6, 1)).astype(np.float32)
  words = rng.integers(0, 50, (ROWS, 5)).astype(np.int32)
  return (images, words), rng.integers(0, 10, ROWS)


def build(learning_rate=1e-3, **options) -> keras.Model:
  """Returns a model with every kind of layer that sums over rows in its own way."""
  keras.utils.set_random_seed(1)
  layers = keras.layers
  images, words = layers.Input([6, 6, 1]), layers.Input([5], dtype='int32')
  x = layers.Conv2D(8, 3, use_bias=False)(images)
  x = layers.ReLU()(layers.BatchNormalization()(x))
  y = layers.Embedding(50, 8)(words)
  x = layers.Concatenate()([layers.Flatten()(x), layers.Flatten()(y)])
  x = layers.Dropout(0.3, seed=5)(layers.Dense(128, 'relu')(x))
  model = keras.Model([images, words], layers.Dense(10)(x))
  model.compile(
    keras.optimizers.Adam(learning_rate, global_clipnorm=1.0, **options),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=['accuracy'],
  )
  return model


def state(model) -> list[np.ndarray]:
  """Returns the weights and the optimizer's state."""
  variables = [*model.weights, *model.optimizer.variables]
  return [keras.ops.convert_to_numpy(v) for v in variables]


def digest(arrays) -> str:
  """Returns a SHA-256 hash of all bits."""
  return hashlib.sha256(b''.join(a.tobytes() for a in arrays)).hexdigest()


def fit(
  strategy=None,
  epochs=EPOCHS,
  steps_per_execution=1,
  is_short=False,
  **options,
):
  """Trains, evaluates and predicts. Returns the final state and all reported values."""
  scope = strategy.scope() if strategy else contextlib.nullcontext()
  with scope:
    model = build(**options)
    model.steps_per_execution = steps_per_execution
  x, y = data()
  history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
  if is_short:
    return state(model), list(map(np.asarray, history.history.values()))
  evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0)
  predictions = model.predict(x, batch_size=BATCH, verbose=0)
  reported = [*history.history.values(), evaluation, predictions]
  return state(model), [np.asarray(r) for r in reported]


def digests(state_and_reports) -> tuple[str, str]:
  """Returns the digest of the state and the digest of the reported values."""
  values, reports = state_and_reports
  return digest(values), digest(reports)


def add_plain_floats():
  """Mutates the package to add plain floats instead of integers."""
  from tf_strategies.strategies.mirrored import exact_sums

  exact_sums.encode = lambda term, scale: term
  exact_sums.decode = lambda total, scale, dtype: total


def train_as_worker(rank, options, num_devices=1, load=None, **arguments):
  """Trains as one of several workers and returns the digests."""
  del rank
  if load is not None:
    load()
  import tf_strategies as tfs
  from tests import virtual_devices

  virtual_devices.configure()
  strategy = tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(**options),
    devices=virtual_devices.names(num_devices),
  )
  found = digests(fit(strategy, **arguments))
  calls = strategy.communication_report()['calls']
  strategy.close()
  return found, calls


def batches(epoch, step, epochs):
  """Returns the batches from a position on. Every epoch has its own order."""
  (images, words), labels = data()
  indices = []
  for e in range(epoch, epochs):
    order = np.random.default_rng(e).permutation(ROWS)
    indices += [order[i : i + BATCH] for i in range(0, ROWS, BATCH)]
  found = tf.data.Dataset.from_generator(
    lambda: indices[step:], output_signature=tf.TensorSpec([None], tf.int64)
  )
  return found.map(
    lambda i: (
      (tf.gather(images, i), tf.gather(words, i)),
      tf.gather(labels, i),
    )
  )


def train_alone(strategy, epochs):
  """Trains on one process. Elastic workers must end with the same digest."""
  with strategy.scope():
    model = build()
  model.fit(
    batches(0, 0, epochs), epochs=epochs, steps_per_epoch=STEPS, verbose=0
  )
  return digest(state(model))


# One more than the largest number of workers.
ELASTIC_SHARDS = 4
# While this file is missing, training pauses after each step.
HURRY = 'hurry'


def train_elastically(rank, options, directory, epochs, seconds_a_step):
  """Trains while workers join and leave. Returns the digest and the generations."""
  import tf_strategies as tfs

  class Report(keras.callbacks.Callback):
    """Reports the progress of training to the test through a file."""

    def on_train_batch_end(self, batch, logs=None):
      with open(os.path.join(directory, f'steps_{rank}'), 'a') as f:
        f.write(f'{time.time()}\n')
      if not os.path.exists(os.path.join(directory, HURRY)):
        time.sleep(seconds_a_step)

  jobs = []

  def run(job):
    jobs.append(job)
    with job.strategy.scope():
      model = build()
    job.restore(model)
    job.fit(
      model,
      lambda epoch, step: batches(epoch, step, epochs),
      epochs,
      STEPS,
      callbacks=[Report()],
      verbose=0,
    )
    return model

  group = tfs.process_group.GroupOptions.from_env(
    heartbeat_timeout_seconds=10.0, rendezvous_timeout_seconds=90.0
  )
  ring = tfs.RingOptions(group=group, reproducible=ELASTIC_SHARDS)
  model = tfs.elastic.run(run, options, ring=ring)
  return digest(state(model)), jobs[-1].generations
