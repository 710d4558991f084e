"""What every worker of an elastic test does: trains, and says how it went."""

import os
import time

import numpy as np

ROWS = 640
EPOCHS = 4
BATCH = 32
STEPS = ROWS // BATCH


def data():
  """Rows of ten classes that a linear model can tell apart."""
  rng = np.random.default_rng(5)
  centres = rng.normal(size=(10, 16))
  y = np.arange(ROWS) % 10
  x = centres[y] + 0.3 * rng.normal(size=(ROWS, 16))
  return x.astype(np.float32), y


def build():
  """A small model, built, the same in every process."""
  import keras

  keras.utils.set_random_seed(1)
  return keras.Sequential(
    [
      keras.layers.Input([16]),
      keras.layers.Dense(32, 'relu'),
      keras.layers.Dense(10),
    ]
  )


def compile_model(model, optimizer):
  """The loss and metric of the test."""
  import keras

  model.compile(
    optimizer,
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=['accuracy'],
  )


def make_batches(epoch, step, size=BATCH, epochs=EPOCHS):
  """The batches from a place on: every epoch has an order of its own."""
  import tensorflow as tf

  x, y = data()
  batches = []
  for e in range(epoch, epochs):
    order = np.random.default_rng(e).permutation(ROWS)
    batches += [order[i : i + size] for i in range(0, ROWS, size)]
  batches = batches[step:]
  # The last batch of an epoch may have fewer rows.
  indices = tf.data.Dataset.from_generator(
    lambda: batches, output_signature=tf.TensorSpec([None], tf.int64)
  )
  return indices.map(lambda i: (tf.gather(x, i), tf.gather(y, i)))


def momentum():
  """An optimizer with state."""
  import keras

  return keras.optimizers.SGD(0.05, momentum=0.9)


def uninterrupted(epochs=EPOCHS):
  """The weights that one device ends with."""
  model = build()
  compile_model(model, momentum())
  batches = make_batches(0, 0, BATCH, epochs)
  model.fit(batches, epochs=epochs, steps_per_epoch=STEPS, verbose=0)
  return model.get_weights()


def train(
  rank, options, directory, seconds_a_step=0.0, epochs=EPOCHS, log_dir=None
):
  """Trains as one worker, watched with `log_dir`; returns what it ended with."""
  import keras

  import tf_strategies as tfs
  from tf_strategies import _keras_internal

  class Report(keras.callbacks.Callback):
    """Tells the test how far training is, by a file that it can watch."""

    def on_train_batch_end(self, batch, logs=None):
      if _keras_internal.is_skipped(self.model, batch):
        return
      time.sleep(seconds_a_step)
      with open(os.path.join(directory, f'steps_{rank}'), 'a') as f:
        f.write(f'{time.time()}\n')

  jobs = []

  def run(job):
    jobs.append(job)
    with job.strategy.scope():
      model = build()
      compile_model(model, tfs.keras.DistributedOptimizer(momentum()))
    job.restore(model)
    callbacks = [Report()]
    if log_dir is not None:
      timeline = os.path.join(log_dir, 'run.json')
      callbacks.append(tfs.MonitorCallback(log_dir=log_dir, timeline=timeline))
    size = job.global_batch_size(BATCH)
    job.fit(
      model,
      lambda epoch, step: make_batches(epoch, step, size, epochs),
      epochs,
      -(-ROWS // size),
      callbacks=callbacks,
      verbose=0,
    )
    x, y = data()
    accuracy = model.evaluate(x, y, batch_size=BATCH, verbose=0)[1]
    return model, accuracy

  group = tfs.process_group.GroupOptions.from_env(
    heartbeat_timeout_seconds=6.0, rendezvous_timeout_seconds=60.0
  )
  model, accuracy = tfs.elastic.run(
    run, options, ring=tfs.RingOptions(group=group)
  )
  return {
    'weights': model.get_weights(),
    'iterations': int(model.optimizer.iterations.numpy()),
    'accuracy': accuracy,
    'learning_rate': float(model.optimizer.learning_rate.numpy()),
    'generations': jobs[-1].generations,
    'epoch': jobs[-1].epoch,
  }
