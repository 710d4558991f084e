"""The program of the workers in elastic tests: trains and returns its results."""

import itertools
import json
import logging
import os
import pickle
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from tests import processes

ROWS = 640
EPOCHS = 4
BATCH = 32
STEPS = ROWS // BATCH


def data():
  """Returns rows of ten classes that a linear model can separate."""
  rng = np.random.default_rng(5)
  centres = rng.normal(size=(10, 16))
  y = np.arange(ROWS) % 10
  x = centres[y] + 0.3 * rng.normal(size=(ROWS, 16))
  return x.astype(np.float32), y


class TwoOptimizers(keras.Model):
  """A critic and an actor, trained in one step. The actor reads the updated critic."""

  def __init__(self):
    super().__init__()
    self.critic = keras.layers.Dense(10)
    self.actor = keras.Sequential(
      [
        keras.layers.Dense(24, 'relu'),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1, seed=3),
        keras.layers.Dense(10),
      ]
    )
    self.critic_optimizer = keras.optimizers.Adam(0.01)
    self.build([None, 16])

  def build(self, input_shape):
    self.critic.build(input_shape)
    self.actor.build(input_shape)
    self.critic_optimizer.build(self.critic.trainable_variables)
    self.built = True

  def call(self, x, training=False):
    return self.actor(x, training=training) + self.critic(x)

  def train_step(self, data):
    x, y = data
    with tf.GradientTape() as tape:
      loss = self.compute_loss(x, y, self.critic(x))
    variables = self.critic.trainable_variables
    self.critic_optimizer.apply(tape.gradient(loss, variables), variables)
    with tf.GradientTape() as tape:
      outputs = self(x, training=True)
      loss = self.compute_loss(x, y, outputs)
    variables = self.actor.trainable_variables
    self.optimizer.apply(tape.gradient(loss, variables), variables)
    return self.compute_metrics(x, y, outputs)


def build(kind):
  """Returns a built model, the same in every process."""
  keras.utils.set_random_seed(1)
  layers = keras.layers
  if kind == 'two_optimizers':
    return TwoOptimizers()
  if kind == 'embedding':
    # The gradient of the table is an `IndexedSlices`.
    inputs = keras.Input([16])
    numbers = keras.ops.cast(10 * keras.ops.abs(inputs), 'int32') % 50
    rows = layers.Flatten()(layers.Embedding(50, 4)(numbers))
    joined = layers.Concatenate()([inputs, rows])
    return keras.Model(inputs, layers.Dense(10)(joined))
  with_state = ()
  if kind == 'rich':
    with_state = layers.BatchNormalization(), layers.Dropout(0.2, seed=7)
  return keras.Sequential(
    [
      layers.Input([16]),
      layers.Dense(32, 'relu'),
      *with_state,
      layers.Dense(10),
    ]
  )


def compiled(kind):
  """Returns a compiled model whose optimizer has state."""
  model = build(kind)
  optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
  if kind == 'embedding':
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
  model.compile(
    optimizer,
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=['accuracy'],
  )
  return model


def make_batches(epoch, step, size=BATCH, epochs=EPOCHS):
  """Returns the batches from a position on. Each epoch has its own order."""
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


def uninterrupted(epochs=EPOCHS, kind='plain', size=BATCH):
  """Returns the final weights on one device, and the history."""
  model = compiled(kind)
  history = model.fit(
    make_batches(0, 0, size, epochs),
    epochs=epochs,
    steps_per_epoch=-(-ROWS // size),
    verbose=0,
    **fit_options(kind),
  )
  return model.get_weights(), history.history


class Decay(keras.callbacks.Callback):
  """Multiplies the learning rate by a factor after each step."""

  def on_train_batch_end(self, batch, logs=None):
    optimizer = self.model.optimizer
    optimizer.learning_rate = 0.99 * optimizer.learning_rate.numpy()


def fit_options(kind):
  """Returns the arguments of `fit` besides the batches."""
  if kind == 'plain':
    return {}
  if kind == 'decay':
    return {'callbacks': [Decay()]}
  x, y = data()
  validation = tf.data.Dataset.from_tensor_slices((x[:100], y[:100])).batch(30)
  # These callbacks change training depending on the number of epochs.
  callbacks = [
    keras.callbacks.ReduceLROnPlateau(
      'val_loss', factor=0.7, patience=1, min_delta=0.05
    ),
    keras.callbacks.EarlyStopping(
      'val_loss', patience=1000, restore_best_weights=True
    ),
  ]
  return {'validation_data': validation, 'callbacks': callbacks}


class Events(keras.callbacks.Callback):
  """Counts its events, like a callback that decides when to save."""

  def __init__(self):
    super().__init__()
    self.epochs_begun = self.epochs_ended = 0
    self.batches_begun = self.batches_ended = 0

  def on_epoch_begin(self, epoch, logs=None):
    self.epochs_begun += 1

  def on_train_batch_begin(self, batch, logs=None):
    self.batches_begun += 1

  def on_train_batch_end(self, batch, logs=None):
    self.batches_ended += 1

  def on_epoch_end(self, epoch, logs=None):
    self.epochs_ended += 1


def train_on_other_data(rank, options, directory, *args):
  """Calls `train`. A restarted worker has different data."""
  path = os.path.join(directory, f'began_{rank}')
  if os.path.exists(path):
    x, y = data()
    globals()['data'] = lambda: (x + 0.1, y)
  open(path, 'w').close()
  return train(rank, options, directory, *args)


class Best(keras.callbacks.ModelCheckpoint):
  """A `ModelCheckpoint` with an array attribute."""

  losses = np.zeros([0])

  def on_epoch_end(self, epoch, logs=None):
    super().on_epoch_end(epoch, logs)
    self.losses = np.append(self.losses, logs['loss'])


def train_with_files(rank, options, directory, *args):
  """Calls `train` with Keras callbacks that have the same paths on all workers."""
  path = os.path.join(directory, 'files')
  best = Best(os.path.join(path, 'best.keras'), 'loss', save_best_only=True)
  callbacks = [
    best,
    keras.callbacks.ModelCheckpoint(
      os.path.join(path, '{epoch}.weights.h5'), save_weights_only=True
    ),
    keras.callbacks.CSVLogger(os.path.join(path, 'log.csv')),
    keras.callbacks.TensorBoard(path, write_steps_per_second=True),
  ]
  globals()['fit_options'] = lambda kind: {'callbacks': callbacks}
  result = train(rank, options, directory, *args)
  return {**result, 'best': float(best.best), 'losses': best.losses}


def _fail_after_steps():
  from tf_strategies import errors
  from tf_strategies.fault_tolerance import elastic_members

  run_step = elastic_members.Members.run_step
  calls = itertools.count(1)

  def run_failing_step(self, kind, compute, *args, **options):
    def compute_and_fail():
      outputs = compute()
      if next(calls) % 7 == 0:
        raise errors.WorkerUnavailableError('a fault for the test')
      return outputs

    return run_step(self, kind, compute_and_fail, *args, **options)

  elastic_members.Members.run_step = run_failing_step


class Ends(logging.Handler):
  """Records when this worker notices that its group has ended."""

  def __init__(self):
    super().__init__()
    self.times = []

  def emit(self, record):
    if 'Forming again' in record.getMessage():
      self.times.append(record.created)


def train(
  rank,
  options,
  directory,
  step_seconds=0.0,
  epochs=EPOCHS,
  kind='plain',
  batch=BATCH,
  failing=(),
):
  """Trains as one worker. Returns its results.

  On the ranks `failing`, every seventh step raises after it was computed, as if the
  worker had missed the result of its last collective.
  """
  if rank in failing:
    _fail_after_steps()
  import tf_strategies as tfs

  class Report(keras.callbacks.Callback):
    """Writes a line to a file after each step, for the test."""

    def on_train_batch_end(self, batch, logs=None):
      time.sleep(step_seconds)
      with open(os.path.join(directory, f'steps_{rank}'), 'a') as f:
        f.write(f'{time.time()}\n')

  jobs, histories, events, ends = [], [], [], Ends()
  logging.getLogger('absl').addHandler(ends)

  def run(job):
    jobs.append(job)
    with job.strategy.scope():
      model = compiled(kind)
    job.restore(model)
    given = fit_options(kind)
    events.append(Events())
    callbacks = [*given.pop('callbacks', ()), Report(), events[-1]]
    histories.append(
      job.fit(
        model,
        lambda epoch, step: make_batches(epoch, step, batch, epochs),
        epochs,
        -(-ROWS // batch),
        callbacks=callbacks,
        verbose=0,
        **given,
      )
    )
    x, y = data()
    return model, model.evaluate(x, y, batch_size=BATCH, verbose=0)[1]

  group = tfs.process_group.GroupOptions.from_env(
    heartbeat_timeout_seconds=6.0, rendezvous_timeout_seconds=60.0
  )
  model, accuracy = tfs.elastic.run(
    run, options, ring=tfs.RingOptions(group=group)
  )
  extended = model.distribute_strategy.extended
  return {
    'task': (extended._task_type, extended._task_id, extended._is_chief),
    'workers': (
      extended._num_workers,
      len(extended._cluster_spec.as_dict()['worker']),
    ),
    'weights': model.get_weights(),
    'iterations': int(model.optimizer.iterations.numpy()),
    'accuracy': accuracy,
    'generations': jobs[-1].generations,
    'ends': ends.times,
    'history': histories[-1] and histories[-1].history,
    'events': {k: v for k, v in vars(events[-1]).items() if '_' in k[1:]},
  }


def result_path(directory, rank):
  """Returns the path to which `main` writes the result of `train`."""
  return os.path.join(directory, f'result_{rank}')


def outcome(directory, rank):
  """Returns the outcome of a worker that ran `main`."""
  with open(result_path(directory, rank), 'rb') as file:
    return processes.Outcome(rank, 0, pickle.load(file))


def main(directory, options, arguments):
  """Trains as a program and pickles the result.

  Args:
    directory: directory of the result.
    options: arguments of `ElasticOptions`, as JSON.
    arguments: arguments of `train`, as JSON.
  """
  rank = json.loads(os.environ['TF_CONFIG'])['task']['index']
  import tf_strategies as tfs

  options = tfs.ElasticOptions(**json.loads(options))
  result = train(rank, options, directory, **json.loads(arguments))
  path = result_path(directory, rank)
  with open(path + '~', 'wb') as file:
    pickle.dump(result, file)
  os.rename(path + '~', path)


if __name__ == '__main__':
  main(*sys.argv[1:])
