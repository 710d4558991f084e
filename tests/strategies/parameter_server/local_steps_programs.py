"""What the chief of `local_steps_test` runs; jobs are those of several workers."""

import contextlib
import logging
import os
import pathlib
import tempfile
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl import logging as absl_logging

import tf_strategies as tfs
from tests.strategies.multi_worker import local_steps_workers as workers_lib
from tests.strategies.parameter_server import wire
from tf_strategies.strategies.parameter_server import local_units, microbatch


@contextlib.contextmanager
def _training(job, mode='sync', **options):
  """A strategy and a model of a job."""
  keras.backend.clear_session()
  strategy = tfs.ParameterServerStrategy(mode=mode, **options)
  try:
    with strategy.scope():
      yield (
        strategy,
        workers_lib.model_of(job, lambda: workers_lib.local_steps(job)),
      )
  finally:
    strategy.close()


def _fit(model, job, reader=None, **options):
  """Fits; by workers that read what they would be sent, if a strategy is given."""
  dataset = workers_lib.dataset(job)
  if reader is not None:
    dataset = _read_by_workers(reader, job)
  return model.fit(dataset, epochs=job.epochs, verbose=0, **options)


def _read_by_workers(strategy, job):
  def make(context):
    count, place = context.num_input_pipelines, context.input_pipeline_id

    def share(*batch):
      each, extra = (
        tf.shape(batch[0])[0] // count,
        tf.shape(batch[0])[0] % count,
      )
      first = place * each + tf.minimum(place, extra)
      last = first + each + tf.cast(place < extra, tf.int32)
      return tuple(tensor[first:last] for tensor in batch)

    data = workers_lib.dataset(job)
    if strategy.options.mode != 'sync':
      return data.shard(count, place)
    data = data.map(share)
    if job.rows % job.batch >= count or not job.rows % job.batch:
      return data
    return data.filter(lambda x, y: tf.shape(x)[0] > 0)

  return strategy.distribute_datasets_from_function(make)


def train(job, mode='sync', parts=1, reads=False):
  """Trains a job; the weights, what was reported, and what the strategy counted."""
  options = {}
  if parts > 1:
    partitioners = tf.distribute.experimental.partitioners
    options['variable_partitioner'] = partitioners.FixedShardsPartitioner(parts)
  with _training(job, mode, **options) as (strategy, model):
    seen = []
    note = keras.callbacks.LambdaCallback(
      on_train_batch_end=lambda batch, logs: seen.append(float(logs['loss']))
    )
    reader = strategy if reads else None
    history = _fit(model, job, reader, callbacks=[note]).history
    dataset = workers_lib.dataset(job)
    return {
      'weights': model.get_weights(),
      'history': history,
      'evaluation': model.evaluate(dataset, verbose=0, return_dict=True),
      'logs': seen,
      'iterations': int(model.optimizer.iterations.numpy()),
      'report': strategy.report(),
    }


def train_all(jobs):
  """What `train` returns of each of (job, mode), by name."""
  return {name: train(*arguments) for name, arguments in jobs.items()}


def train_wrongly(job):
  """Weights where the differences of all workers count alike, whatever their rows."""

  def alike(rows):
    return [tf.constant(1 / len(rows))] * len(rows)

  with mock.patch.object(microbatch, '_weights', alike):
    return train(job)['weights']


def loop(job):
  """Weights after a loop of the user's own, and how many steps were done."""
  with _training(job) as (strategy, model):
    optimizer, trained = model.optimizer, model.trainable_variables
    optimizer.build(trained)

    @tf.function
    def compute_loss(x, y):
      return model.compute_loss(x, y, model(x, training=True))

    def train_step(batch):
      with tf.GradientTape() as tape:
        loss = compute_loss(*batch)
      optimizer.apply(tape.gradient(loss, trained), trained)
      return {'loss': loss}

    step = strategy.remote_step(train_step, [optimizer])
    for _ in range(job.epochs):
      for batch in workers_lib.dataset(job).as_numpy_iterator():
        step(batch)
    strategy.join()
    before = strategy.report()['steps']
    optimizer.meet()
    return model.get_weights(), before, strategy.report()['steps']


def use_in_the_middle(job):
  """What an evaluation in the middle of a unit, and files, have."""
  found = {}
  with _training(job) as (strategy, model):
    x, y = workers_lib.data(job)

    def ask(batch, logs):
      if batch == 1:
        waiting, before = strategy.engine.local.waiting, model.get_weights()
        model.evaluate(x, y, batch_size=job.batch, verbose=0)
        waits = strategy.engine.local.waiting
        found['middle'] = waiting, waits, before, model.get_weights()

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=ask)
    _fit(model, job, callbacks=[callback])
    found['steps'] = strategy.report()['steps']
    weights = found['weights'] = model.get_weights()
    with tempfile.TemporaryDirectory() as directory:
      path = os.path.join(directory, 'model.keras')
      model.save(path)
      loaded = keras.models.load_model(path)
      # Outside of any strategy, to predict.
      found['loaded'] = loaded.get_weights()
    inner = model.optimizer.inner_optimizer
    moment = inner._momentums[0]
    found['moment'] = moment.numpy()
    with strategy.scope():
      moment.assign(moment + 1)
    found['assigned'] = moment.numpy()
    inner.learning_rate = 0.0
    _fit(model, job)
    # Each worker goes on from what was assigned, but trains at rate 0.
    found['after'] = weights, model.get_weights()
  return found


class _StopError(Exception):
  """Ends a `fit` in the middle."""


def interrupt_and_resume(job, directory):
  """Trains at once; and until an error, then from the newest checkpoint."""
  found = {}
  for name in ('whole', 'interrupted', 'resumed'):
    options = {}
    if name != 'whole':
      options = {'checkpoint_dir': directory, 'checkpoint_steps': job.every}
    with _training(job, **options) as (strategy, model):
      seen = []

      def note(batch, logs, name=name, seen=seen):
        seen.append(batch)
        if name == 'interrupted' and len(seen) == 17:
          raise _StopError

      callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=note),
        tfs.ResumeFit(strategy),
      ]
      with contextlib.suppress(_StopError):
        history = _fit(model, job, callbacks=callbacks).history
        optimizer = model.optimizer
        found[name] = {
          'weights': model.get_weights(),
          'state': [np.asarray(v.numpy()) for v in optimizer.variables],
          'loss': history['loss'][-1],
          'steps': strategy.report()['steps'],
        }
  return found


class _Slow(keras.layers.Layer):
  """Returns its input, after a while."""

  def call(self, x):
    matrix = tf.fill([600, 600], tf.reduce_mean(x))
    _, matrix = tf.while_loop(
      lambda i, m: i < 24, lambda i, m: (i + 1, tf.tanh(m @ m)), [0, matrix]
    )
    return x + 1e-30 * tf.reduce_mean(matrix)


def train_while_others_die(job, mode, progress, options, reads=False):
  """Trains slowly; tells how many batches there were in a file.

  Returns weights, rows of the last epoch, a report, what was logged, and of each unit
  that a worker began: which worker, when, and until when if it failed.
  """
  logged, began = [], []
  train_unit = local_units._Unit._train

  def train_watched(unit, worker, place):
    entry = [worker, time.time(), None]
    began.append(entry)
    try:
      return train_unit(unit, worker, place)
    except tf.errors.OpError:
      entry[2] = time.time()
      raise

  class Recorder(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record):
      logged.append(record.getMessage())

  absl_logging.get_absl_logger().addHandler(Recorder(logging.WARNING))
  count = 0

  def tell(batch, logs):
    nonlocal count
    count += 1
    pathlib.Path(progress + '.part').write_text(str(count))
    os.replace(progress + '.part', progress)
    time.sleep(0.05)

  with (
    mock.patch.object(local_units._Unit, '_train', train_watched),
    _training(job, mode, **options) as (strategy, plain),
  ):
    with strategy.scope():
      model = keras.Sequential(
        [keras.Input([workers_lib.FEATURES]), _Slow(), *plain.layers]
      )
      loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
      model.compile(workers_lib.local_steps(job), loss)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=tell)
    reader = strategy if reads else None
    _fit(model, job, reader, callbacks=[callback, tfs.ResumeFit(strategy)])
    # The sum of all rows' weights, of the last epoch.
    rows = float(model.metrics[0].variables[1].numpy())
    report = {
      **strategy.report(),
      'iterations': int(model.optimizer.iterations.numpy()),
      'outer_iterations': int(model.optimizer.outer.iterations.numpy()),
    }
    return model.get_weights(), rows, report, logged, began


def bytes_of_epochs(every, counts):
  """Bytes that are sent in an epoch, by `every`; and of the parameters."""
  found = {}
  for number in every:
    job = workers_lib.Job(number, rows=4 * 32, batch=4)
    with _training(job) as (_, model):
      with model.distribute_strategy.scope():
        inner = workers_lib.optimizer(job.inner)
        outer = workers_lib.optimizer(job.outer)
        wide = keras.Sequential(
          [
            keras.Input([workers_lib.FEATURES]),
            keras.layers.Dense(1000),
            keras.layers.Dense(300),
            keras.layers.Dense(workers_lib.CLASSES),
          ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if number:
          inner = tfs.keras.LocalSteps(inner, number, outer)
        wide.compile(inner, loss)
      ends = []
      note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *unused, ends=ends: ends.append(
          sum(wire.sent(counts))
        )
      )
      # In the first, functions are sent.
      wide.fit(workers_lib.dataset(job), epochs=3, verbose=0, callbacks=[note])
      found[number] = ends[2] - ends[1]
      parameters = 4 * wide.count_params()
  return found, parameters


# What is refused.


def _data():
  x = np.ones([16, 4], np.float32)
  return x, x[:, :1]


def _model(optimizer=None, **options):
  model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
  model.compile(optimizer or tfs.keras.LocalSteps('sgd', 2), 'mse', **options)
  return model


def two_kinds(strategy):
  model = _model()
  model.another = keras.optimizers.Adam()
  model.fit(*_data(), verbose=0)


def two_optimizers(strategy):
  model = _model()
  model.another = tfs.keras.LocalSteps('sgd', 2)
  model.fit(*_data(), verbose=0)


def loop_without_the_optimizer(strategy):
  model = _model()
  model.optimizer.build(model.trainable_variables)

  def step(batch):
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(model(batch[0]) ** 2)
    variables = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)
    return loss

  strategy.remote_step(step)(_data())
  strategy.join()


class _Largest(keras.metrics.Metric):
  def __init__(self):
    super().__init__()
    self.largest = self.add_variable([], 'zeros', name='largest')

  def update_state(self, y_true, y_pred, sample_weight=None):
    self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

  def result(self):
    return self.largest


def metric_that_is_no_sum(strategy):
  _model(metrics=[_Largest()]).fit(*_data(), verbose=0)


def dynamic_table(strategy):
  layers = [tfs.keras.DynamicEmbedding(2), keras.layers.Flatten()]
  ids = keras.Input([4], dtype='int64')
  model = keras.Sequential([ids, *layers, keras.layers.Dense(1)])
  model.compile(tfs.keras.LocalSteps('sgd', 2), 'mse')
  model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)


def backup_workers(strategy):
  _model().fit(*_data(), verbose=0)


REFUSED = {
  two_kinds: 'Adam beside LocalSteps',
  two_optimizers: r"\['LocalSteps', 'LocalSteps'\].*one optimizer a step",
  loop_without_the_optimizer: r'outside of the steps.*remote_step\(fn, \[optimizer',
  metric_that_is_no_sum: "metric variable '.*largest:0' that is no sum",
  dynamic_table: "dynamic table '.*' under LocalSteps.*keras.layers.Embedding",
  backup_workers: "backup_workers=1.*leave out backup_workers, or use mode='async'",
}


def refuse_all():
  """What each of REFUSED is told, by name."""
  found = {}
  for program in REFUSED:
    keras.backend.clear_session()
    options = {'backup_workers': 1} if program is backup_workers else {}
    strategy = tfs.ParameterServerStrategy(mode='sync', **options)
    try:
      with strategy.scope():
        program(strategy)
      found[program.__name__] = ''
    except tfs.errors.UnsupportedOptionError as e:
      found[program.__name__] = str(e)
    finally:
      strategy.close()
  return found
