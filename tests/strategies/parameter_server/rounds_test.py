"""Synchronous steps on data that workers read equal training on one device.

The one device trains on the joined batches that the workers read for a step.
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
from tests import parameter_servers, tf_case
from tests.programs import common
from tests.strategies.parameter_server import chief

layers = keras.layers
# Rows of each batch, by worker. The pipelines end in different steps.
_SIZES = ((4, 4, 4, 4, 2), (7, 7, 1))
_ROUNDS = 5
_EPOCHS = 2


def _rows(worker):
  """Returns all rows of a worker's pipeline. All rows differ."""
  count = sum(_SIZES[worker])
  x = np.random.default_rng(worker).normal(size=[count, 5]).astype(np.float32)
  return x + worker, x[:, :1] * x[:, 1:2] - worker


def _batches(worker):
  """Returns the batches of a worker. Their number is known."""
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
  """A model with a metric that is updated with the mean of all rows of a step."""

  def __init__(self):
    super().__init__()
    self.inner = layers.Dense(8, 'tanh')
    self.outer = layers.Dense(1)
    self.seen = keras.metrics.Mean('seen')

  def call(self, x, training=False):
    if training:
      self.seen.update_state(tf.reduce_mean(x))
    return self.outer(self.inner(x))


def _fit(data, steps_per_execution=1, steps=None):
  """Returns the steps that Keras counted, history, state, and further results."""
  counted = []
  model = Tracking()
  model.compile(
    keras.optimizers.Adam(0.05, global_clipnorm=0.5),
    'mse',
    metrics=['mae', keras.metrics.RootMeanSquaredError()],
    steps_per_execution=steps_per_execution,
  )
  count = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda step, logs: counted.append(step)
  )
  used = {'steps': steps and 3, 'verbose': 0}
  return (
    counted,
    common.fitted(model, data, steps_per_epoch=steps, callbacks=[count]),
    model.evaluate(data, **used),
    model.predict(data, **used),
  )


def _servers():
  keras.backend.clear_session()
  return contextlib.closing(tfs.ParameterServerStrategy(mode='sync'))


def _read(strategy, batches=_batches):
  return strategy.distribute_datasets_from_function(
    lambda context: batches(context.input_pipeline_id)
  )


def _on_servers(batches, *options):
  with _servers() as strategy:
    data = _read(strategy, batches)
    found = common.run(lambda: _fit(data, *options), strategy)
    return found, strategy.report()


def unknown():
  return _on_servers(_of_unknown_number)


def in_groups():
  return _on_servers(_batches, 2)


def steps_per_epoch():
  return _on_servers(_repeated, 1, 4)


def _refused(make_model, is_read=True):
  """Returns the error for a model that needs whole batches."""
  with _servers() as strategy:
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
  """Returns the number of warnings that one worker computes whole batches."""
  with mock.patch.object(logging, 'warning') as warning:
    assert not dropout(is_read=False)
  return sum('on one worker' in c.args[0] for c in warning.call_args_list)


class OwnStep(keras.Sequential):
  def train_step(self, data):
    return super().train_step(data)


def own_step():
  return _refused(lambda: OwnStep([layers.Dense(1)]))


class Mixed(Tracking):
  """Updates its metric with a mean and with rows, which need different weights."""

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
  """Returns the result and the weight after each step of a custom loop."""
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
)


class RoundsTest(tf_case.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.found = chief.Programs({p.__name__: p for p in _PROGRAMS})

  @parameterized.parameters(
    ('unknown', _ROUNDS, 1),
    ('in_groups', _ROUNDS, 2),
    ('steps_per_epoch', 4, 1, 4),
  )
  @pytest.mark.smoke
  def test_equals_one_device(self, name, rounds, *options):
    found, report = self.found[name]
    data = _concatenated(rounds)
    if name == 'steps_per_epoch':
      data = _concatenated(rounds * _EPOCHS, repeats=True)
    want = common.run(lambda: _fit(data, *options))
    tf.nest.assert_same_structure(want, found)
    self.assertAllClose(want, found, 1e-6, 2e-6)
    self.assertEqual(report['steps'], _EPOCHS * rounds)
    self.assertEqual(report['dropped'], 0)

  def test_step_that_needs_the_whole_batch_is_refused(self):
    for name, message in (
      ('dropout', "random numbers, as of Dropout.*mode='sync'.*pass the"),
      ('own_step', "which it reads when.*'sync'"),
      ('metric_of_both', "'seen/total' gets both sums over rows and other"),
    ):
      self.assertRegex(self.found[name], message)

  def test_whole_batches_on_one_worker_are_reported_once(self):
    self.assertEqual(self.found['dropout_of_whole_batches'], 1)

  def test_no_data_raises(self):
    self.assertRegex(self.found['nothing_to_read'], 'got none for any of 2')

  @pytest.mark.smoke
  def test_custom_loop_equals_one_device(self):
    means = [np.mean(x) for x, _ in _concatenated(_ROUNDS).as_numpy_iterator()]
    want = list(zip(means, np.cumsum(means), strict=True))
    self.assertAllClose(want, self.found['loop'], 1e-6, 1e-6)


class OneWorkerTest(tf.test.TestCase):
  @pytest.mark.soak
  def test_one_worker_gets_whole_batches(self):
    with parameter_servers.Job(num_workers=1, num_ps=1) as job:
      self.assertEqual(job.run(dropout), '')


if __name__ == '__main__':
  tf.test.main()
