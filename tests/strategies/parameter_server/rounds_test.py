"""Synchronous steps on data that workers read equal one device's.

That one trains on what the workers read for a step, one batch after the other.
"""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tests.programs import common
from tests.strategies.parameter_server import chief

layers = keras.layers
# Rows of each batch of each worker: their pipelines end in different steps.
_SIZES = ((4, 4, 4, 4, 2), (7, 7, 1))
_ROUNDS = 5
_EPOCHS = 2


def _rows(worker):
  """Returns all rows of a worker's pipeline. All rows differ."""
  count = sum(_SIZES[worker])
  x = np.random.default_rng(worker).normal(size=[count, 5]).astype(np.float32)
  return x + worker, x[:, :1] * x[:, 1:2] - worker


def _batches(worker):
  """The batches of a worker, of a known number."""
  size = max(_SIZES[worker])
  return tf.data.Dataset.from_tensor_slices(_rows(worker)).batch(size)


def _of_unknown_number(worker):
  return _batches(worker).filter(lambda x, y: True)


def _repeated(worker):
  return _batches(worker).repeat()


def _concatenated(steps, repeats=False):
  """Returns data for one device: each batch joins the workers' batches of a step."""
  found = []
  for step in range(steps):
    parts = []
    for worker, sizes in enumerate(_SIZES):
      batch = step % len(sizes) if repeats else step
      if batch < len(sizes):
        first = sum(sizes[:batch])
        rows = slice(first, first + sizes[batch])
        parts.append([array[rows] for array in _rows(worker)])
    found.append(
      [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    )
  spec = tuple(tf.TensorSpec([None, *a.shape[1:]]) for a in found[0])
  return tf.data.Dataset.from_generator(
    lambda: map(tuple, found), output_signature=spec
  ).apply(tf.data.experimental.assert_cardinality(steps))


class Tracking(keras.Model):
  """Has a metric of a number a step: the mean of its rows."""

  def __init__(self):
    super().__init__()
    self.inner = layers.Dense(8, 'tanh')
    self.outer = layers.Dense(1)
    self.seen = keras.metrics.Mean('seen')

  def call(self, x, training=False):
    if training:
      self.seen.update_state(tf.reduce_mean(x))
    return self.outer(self.inner(x))


def _fit(make_dataset, strategy=None, steps_per_execution=1, **fit):
  """Weights, history, evaluation, predictions, and steps that Keras counted."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(3)
  steps = []
  with common.scope_of(strategy):
    model = Tracking()
    model.compile(
      keras.optimizers.Adam(0.05, global_clipnorm=0.5),
      'mse',
      metrics=['mae', keras.metrics.RootMeanSquaredError()],
      steps_per_execution=steps_per_execution,
    )
  count = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda step, logs: steps.append(step)
  )
  fit = {'epochs': _EPOCHS, 'verbose': 0, 'callbacks': [count], **fit}
  history = model.fit(make_dataset(), **fit).history
  used = {}
  if 'steps_per_epoch' in fit:
    used['steps'] = 3
  evaluation = model.evaluate(
    make_dataset(), verbose=0, return_dict=True, **used
  )
  return {
    'weights': model.get_weights(),
    'history': history,
    'evaluation': evaluation,
    'predictions': model.predict(make_dataset(), verbose=0, **used),
    'steps': steps,
    'iterations': int(model.optimizer.iterations.numpy()),
  }


def _servers(mode='sync'):
  return contextlib.closing(tfs.ParameterServerStrategy(mode=mode))


def _read(strategy, batches=_batches):
  return strategy.distribute_datasets_from_function(
    lambda context: batches(context.input_pipeline_id)
  )


def _on_servers(batches, *args, **fit):
  with _servers() as strategy:
    found = _fit(lambda: _read(strategy, batches), strategy, *args, **fit)
    return {**found, 'report': strategy.report()}


def unknown():
  return _on_servers(_of_unknown_number)


def in_groups():
  return _on_servers(_batches, 2)


def steps_per_epoch():
  return _on_servers(_repeated, steps_per_epoch=4)


def _refused(make_model, is_read=True):
  """Returns the error for a model whose rows cannot be shared."""
  with _servers() as strategy:
    keras.backend.clear_session()
    with strategy.scope():
      model = make_model()
      model.compile('sgd', 'mse')
    try:
      data = _read(strategy) if is_read else _concatenated(_ROUNDS)
      model.fit(data, verbose=0)
    except tfs.errors.UnsupportedOptionError as e:
      return str(e)
  return ''


def dropout(is_read=True):
  return _refused(
    lambda: keras.Sequential([layers.Dropout(0.5), layers.Dense(1)]), is_read
  )


def dropout_of_whole_batches():
  """Returns the number of warnings that one worker computes each batch."""
  with mock.patch.object(logging, 'warning') as warning:
    assert not dropout(is_read=False)
  return sum('on one worker' in c.args[0] for c in warning.call_args_list)


class OwnStep(keras.Sequential):
  def train_step(self, data):
    return super().train_step(data)


def own_step():
  return _refused(lambda: OwnStep([layers.Dense(1)]))


class Mixed(Tracking):
  """Gives its metric a mean, and rows: no weight of a part is right for both."""

  def call(self, x, training=False):
    self.seen.update_state(x[:, 0])
    return super().call(x, training=training)


def metric_of_both():
  return _refused(Mixed)


def nothing_to_read():
  try:
    return _on_servers(
      lambda worker: _batches(worker).filter(lambda x, y: False)
    )
  except tfs.errors.DataError as e:
    return str(e)


def loop():
  """The weight after steps of a loop, of which each is the mean of a round."""
  with _servers() as strategy:
    with strategy.scope():
      weight = tf.Variable(0.0)
      optimizer = keras.optimizers.SGD(1.0)
      optimizer.build([weight])

    def train(batch):
      mean = tf.reduce_mean(batch[0])
      optimizer.apply([-mean], [weight])
      return mean

    step = strategy.step(train, [optimizer])
    return [
      (float(step(batch)), float(weight.numpy())) for batch in _read(strategy)
    ]


def one_by_one():
  """Trains in 'async', a step for each batch; returns weights and predictions."""
  with _servers('async') as strategy:
    with strategy.scope():
      model = keras.Sequential([layers.Dense(1)])
      model.compile('sgd', 'mse')
    data = _read(strategy)
    kernel, bias = model.fit(data, verbose=0).model.get_weights()
    return kernel, bias, model.predict(data, verbose=0)


_PROGRAMS = (
  unknown,
  in_groups,
  steps_per_epoch,
  dropout,
  dropout_of_whole_batches,
  own_step,
  metric_of_both,
  nothing_to_read,
  loop,
  one_by_one,
)


class RoundsTest(tf.test.TestCase, parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    programs = {p.__name__: p for p in _PROGRAMS}
    with parameter_servers.Job(num_workers=2, num_ps=2) as job:
      cls.found = chief.Programs(job, programs)

  def assert_equal(self, want, found):
    for part in ('weights', 'history', 'evaluation', 'predictions'):
      tf.nest.assert_same_structure(want[part], found[part])
      self.assertAllClose(want[part], found[part], 1e-6, 2e-6, part)

  @parameterized.parameters(('unknown', 1), ('in_groups', 2))
  @pytest.mark.smoke
  def test_equals_one_device(self, name, group):
    found = self.found[name]
    self.assert_equal(_fit(lambda: _concatenated(_ROUNDS), None, group), found)
    self.assertEqual(found['iterations'], _EPOCHS * _ROUNDS)
    self.assertEqual(found['report']['steps'], _EPOCHS * _ROUNDS)
    self.assertEqual(found['report']['dropped'], 0)
    self.assertLen(found['predictions'], sum(map(sum, _SIZES)))
    if group == 1:
      self.assertEqual(found['steps'], [*range(_ROUNDS)] * _EPOCHS)

  def test_steps_per_epoch_of_repeated_data(self):
    def make_dataset():
      return _concatenated(4 * _EPOCHS, repeats=True)

    found = self.found['steps_per_epoch']
    self.assert_equal(_fit(make_dataset, steps_per_epoch=4), found)
    self.assertEqual(found['iterations'], 4 * _EPOCHS)

  def test_what_needs_the_whole_batch_is_refused(self):
    self.assertRegex(
      self.found['dropout'],
      "random numbers, as of Dropout.*mode='sync'.*pass the",
    )
    self.assertRegex(self.found['own_step'], "which it reads when.*'sync'")
    self.assertRegex(
      self.found['metric_of_both'],
      "'seen/total' gets both sums over rows and other",
    )

  def test_whole_batches_on_one_worker_are_told_once(self):
    self.assertEqual(self.found['dropout_of_whole_batches'], 1)

  def test_no_data(self):
    self.assertRegex(self.found['nothing_to_read'], 'got none for any of 2')

  @pytest.mark.smoke
  def test_loop(self):
    means = [np.mean(x) for x, _ in _concatenated(_ROUNDS).as_numpy_iterator()]
    want = list(zip(means, np.cumsum(means), strict=True))
    self.assertAllClose(want, self.found['loop'], 1e-6, 1e-6)

  @pytest.mark.smoke
  def test_predictions_of_asynchronous_workers(self):
    kernel, bias, predictions = self.found['one_by_one']
    x = np.concatenate(
      [x for x, _ in _concatenated(_ROUNDS).as_numpy_iterator()]
    )
    self.assertAllClose(x @ kernel + bias, predictions, 1e-6, 1e-5)


class OneWorkerTest(tf.test.TestCase):
  @pytest.mark.soak
  def test_its_batches_are_whole(self):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      self.assertEqual(job.run(dropout), '')


if __name__ == '__main__':
  tf.test.main()
