"""Each element of a data set is trained on exactly once an epoch.

A model counts how often it has seen each element, on the servers.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tests.strategies.parameter_server import chief

_COUNT = 50
_BATCH = 8  # The last batch of an epoch has two elements.
_STEPS = 7
_EPOCHS = 2


class Counting(keras.Model):
  """Counts the elements that steps of each kind have seen."""

  def __init__(self):
    super().__init__()
    self.dense = keras.layers.Dense(1)
    self.trained, self.tested = (
      self.add_weight(
        shape=[_COUNT],
        dtype='int64',
        initializer='zeros',
        trainable=False,
        name=name,
      )
      for name in ('trained', 'tested')
    )

  def call(self, x):
    return self.dense(tf.cast(x, tf.float32)[:, None])

  def train_step(self, data):
    self.trained.assign_add(_histogram(data[0]))
    return super().train_step(data)

  def test_step(self, data):
    self.tested.assign_add(_histogram(data[0]))
    return super().test_step(data)


def _histogram(ids):
  return tf.reduce_sum(tf.one_hot(ids, _COUNT, dtype=tf.int64), 0)


def _elements():
  ids = np.arange(_COUNT)
  return ids, ids.astype(np.float32)[:, None] / _COUNT


def _dataset(shard=None):
  dataset = tf.data.Dataset.from_tensor_slices(_elements())
  if shard is not None:
    dataset = dataset.shard(shard.num_input_pipelines, shard.input_pipeline_id)
  return dataset


def _of_unknown_cardinality(dataset):
  return dataset.filter(lambda x, y: True)


def _run(mode, make_data, steps_per_execution=1, **fit):
  """Fits; the counts, and what the optimizer and the strategy counted."""
  strategy = tfs.create_strategy('parameter_server', mode=mode)
  try:
    keras.backend.clear_session()
    with strategy.scope():
      model = Counting()
      model.compile(
        keras.optimizers.SGD(1e-4),
        'mse',
        steps_per_execution=steps_per_execution,
      )
    data = make_data(strategy)
    x, y = data if isinstance(data, tuple) else (data, None)
    history = model.fit(x, y, verbose=0, **{'epochs': _EPOCHS, **fit})
    return {
      'trained': model.trained.numpy(),
      'tested': model.tested.numpy(),
      'iterations': int(model.optimizer.iterations.numpy()),
      'history': {k: len(v) for k, v in history.history.items()},
      'is_finite': bool(np.isfinite(history.history['loss']).all()),
    }
  finally:
    strategy.close()


def arrays(mode):
  return _run(mode, lambda s: _elements(), batch_size=_BATCH)


def dataset(mode):
  return _run(mode, lambda s: _dataset().shuffle(_COUNT).batch(_BATCH))


def steps_per_execution(mode):
  return _run(mode, lambda s: _dataset().batch(_BATCH), 3)


def unknown_cardinality(mode):
  return _run(mode, lambda s: _of_unknown_cardinality(_dataset()).batch(_BATCH))


def unknown_cardinality_steps_per_execution(mode):
  return _run(
    mode, lambda s: _of_unknown_cardinality(_dataset()).batch(_BATCH), 3
  )


def generator(mode):
  def batches():
    while True:
      yield from _dataset().batch(_BATCH).as_numpy_iterator()

  return _run(mode, lambda s: batches(), steps_per_epoch=_STEPS)


def repeated(mode):
  return _run(
    mode, lambda s: _dataset().batch(_BATCH).repeat(), steps_per_epoch=_STEPS
  )


def distributed(mode):
  return _run(
    mode,
    lambda s: s.experimental_distribute_dataset(_dataset().batch(_BATCH)),
  )


def validation_data(mode):
  return _run(
    mode,
    lambda s: _dataset().batch(_BATCH),
    validation_data=_of_unknown_cardinality(_dataset()).batch(5),
  )


def _read_by_workers(strategy, change=lambda dataset: dataset):
  return strategy.distribute_datasets_from_function(
    lambda context: change(_dataset(context).batch(_BATCH))
  )


def read_by_workers(mode):
  return _run(mode, _read_by_workers)


def read_by_workers_steps_per_execution(mode):
  return _run(mode, _read_by_workers, 3)


def read_by_workers_of_unknown_cardinality(mode):
  return _run(
    mode, functools.partial(_read_by_workers, change=_of_unknown_cardinality)
  )


def read_by_workers_with_uneven_splits(mode):
  """Nearly all of the elements are one worker's."""

  def make(strategy):
    def split(context):
      is_first = context.input_pipeline_id == 0
      if context.num_input_pipelines == 1:
        return _dataset().batch(_BATCH)
      mine = _dataset().filter(lambda x, y: tf.equal(x < 45, is_first))
      return mine.batch(_BATCH)

    return strategy.distribute_datasets_from_function(split)

  return _run(mode, make)


def read_by_workers_repeated(mode):
  return _run(
    mode,
    functools.partial(_read_by_workers, change=lambda d: d.repeat()),
    steps_per_epoch=5,
  )


_FED = (
  arrays,
  dataset,
  steps_per_execution,
  unknown_cardinality,
  unknown_cardinality_steps_per_execution,
  generator,
  repeated,
  distributed,
  validation_data,
)
_READ = (
  read_by_workers,
  read_by_workers_steps_per_execution,
  read_by_workers_of_unknown_cardinality,
  read_by_workers_with_uneven_splits,
)
_FED_PROGRAMS = {p.__name__: p for p in _FED}
_PROGRAMS = {p.__name__: p for p in (*_FED, *_READ, read_by_workers_repeated)}


class _InputTest(parameterized.TestCase):
  num_workers = 2
  mode = 'async'
  programs = _PROGRAMS

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    with parameter_servers.Job(cls.num_workers, 2) as job:
      cls.found = chief.Programs(job, cls.programs, (cls.mode,))

  def assert_each_element_once_an_epoch(self, name):
    found = self.found[name]
    np.testing.assert_array_equal(found['trained'], [_EPOCHS] * _COUNT)
    is_tested = name == validation_data.__name__
    np.testing.assert_array_equal(
      found['tested'], [_EPOCHS * is_tested] * _COUNT
    )
    self.assertEqual(found['history']['loss'], _EPOCHS)
    self.assertTrue(found['is_finite'])
    return found


class TwoWorkersTest(_InputTest):
  @parameterized.named_parameters(*[(p.__name__, p.__name__) for p in _FED])
  def test_fed(self, name):
    found = self.assert_each_element_once_an_epoch(name)
    self.assertEqual(found['iterations'], _EPOCHS * _STEPS)

  @parameterized.named_parameters(*[(p.__name__, p.__name__) for p in _READ])
  def test_read(self, name):
    self.assert_each_element_once_an_epoch(name)

  def test_read_and_repeated(self):
    found = self.found['read_by_workers_repeated']
    self.assertEqual(found['iterations'], 10)
    # 25 elements a split in batches of 8: the last one has a single element.
    self.assertBetween(found['trained'].sum(), 10, 10 * _BATCH)


@pytest.mark.soak
class OneWorkerTest(TwoWorkersTest):
  num_workers = 1


@pytest.mark.soak
class BoundedTest(TwoWorkersTest):
  mode = 'bounded'


@pytest.mark.soak
class SyncTest(_InputTest):
  mode = 'sync'
  programs = _FED_PROGRAMS

  @parameterized.named_parameters(*[(p.__name__, p.__name__) for p in _FED])
  def test_fed(self, name):
    found = self.assert_each_element_once_an_epoch(name)
    self.assertEqual(found['iterations'], _EPOCHS * _STEPS)


del _InputTest  # Else it would be collected too.

if __name__ == '__main__':
  tf.test.main()
