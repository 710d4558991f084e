"""Each element of a dataset is trained on exactly once per epoch.

A model counts how often it has seen each element, on the servers.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests.strategies.parameter_server import chief

_COUNT = 50
_BATCH = 8  # The last batch of an epoch has two elements.
_STEPS = 7
_EPOCHS = 2


class Counting(keras.Model):
  """Counts how often training and test steps have seen each element."""

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

  def call(self, ids, training=False):
    seen = tf.reduce_sum(tf.one_hot(ids, _COUNT, dtype=tf.int64), 0)
    (self.trained if training else self.tested).assign_add(seen)
    return self.dense(tf.cast(ids, tf.float32)[:, None])


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


def _read_by_workers(strategy, change=lambda dataset: dataset):
  return strategy.distribute_datasets_from_function(
    lambda context: change(_dataset(context).batch(_BATCH))
  )


def _uneven_splits(strategy):
  """Returns data in which one worker has nearly all elements."""

  def split(context):
    is_first = context.input_pipeline_id == 0
    if context.num_input_pipelines == 1:
      return _dataset().batch(_BATCH)
    mine = _dataset().filter(lambda x, y: tf.equal(x < 45, is_first))
    return mine.batch(_BATCH)

  return strategy.distribute_datasets_from_function(split)


def _generator(strategy):
  while True:
    yield from _dataset().batch(_BATCH).as_numpy_iterator()


# Functions that create data, and options of `fit`.
_SENT = {
  'arrays': (lambda s: _elements(), {'batch_size': _BATCH}),
  'unknown_cardinality': (
    lambda s: _of_unknown_cardinality(_dataset()).batch(_BATCH),
    {'steps_per_execution': 3},
  ),
  'generator': (_generator, {'steps_per_epoch': _STEPS}),
  'distributed': (
    lambda s: s.experimental_distribute_dataset(_dataset().batch(_BATCH)),
    {'is_tested': True},
  ),
}
_READ_BY_WORKERS = {
  'in_groups': (_read_by_workers, {'steps_per_execution': 3}),
  'of_unknown_cardinality': (
    functools.partial(_read_by_workers, change=_of_unknown_cardinality),
    {},
  ),
  'uneven_splits': (_uneven_splits, {}),
}
_INFINITE = {
  'infinite': (
    functools.partial(_read_by_workers, change=lambda d: d.repeat()),
    {'steps_per_epoch': 5},
  )
}


def train(name, mode):
  """Trains. Returns the counts of the model and of the optimizer."""
  make_data, options = (_SENT | _READ_BY_WORKERS | _INFINITE)[name]
  options = dict(options)
  strategy = tfs.create_strategy('parameter_server', mode=mode)
  try:
    keras.backend.clear_session()
    with strategy.scope():
      model = Counting()
      model.compile(
        keras.optimizers.SGD(1e-4),
        'mse',
        steps_per_execution=options.pop('steps_per_execution', 1),
      )
    if options.pop('is_tested', False):
      data = _of_unknown_cardinality(_dataset()).batch(5)
      options['validation_data'] = data
    data = make_data(strategy)
    x, y = data if isinstance(data, tuple) else (data, None)
    history = model.fit(x, y, verbose=0, epochs=_EPOCHS, **options).history
    return {
      'trained': model.trained.numpy(),
      'tested': model.tested.numpy(),
      'iterations': int(model.optimizer.iterations.numpy()),
      'losses': history['loss'],
    }
  finally:
    strategy.close()


class _InputTest(parameterized.TestCase):
  num_workers = 2
  mode = 'async'
  names = (*_SENT, *_READ_BY_WORKERS, *_INFINITE)

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    programs = {n: functools.partial(train, n) for n in cls.names}
    cls.found = chief.Programs(programs, [cls.mode], cls.num_workers)

  def assert_each_element_once_per_epoch(self, name):
    found = self.found[name]
    np.testing.assert_array_equal(found['trained'], [_EPOCHS] * _COUNT)
    times = _EPOCHS if name == 'distributed' else 0
    np.testing.assert_array_equal(found['tested'], [times] * _COUNT)
    self.assertLen(found['losses'], _EPOCHS)
    self.assertTrue(np.isfinite(found['losses']).all())

  @parameterized.parameters(*_SENT)
  def test_data_sent_to_workers(self, name):
    self.assert_each_element_once_per_epoch(name)
    self.assertEqual(self.found[name]['iterations'], _EPOCHS * _STEPS)


class TwoWorkersTest(_InputTest):
  @parameterized.parameters(*_READ_BY_WORKERS)
  def test_data_read_by_workers(self, name):
    self.assert_each_element_once_per_epoch(name)

  def test_infinite_data_read_by_workers(self):
    found = self.found['infinite']
    self.assertEqual(found['iterations'], 10)
    # 25 elements per split in batches of 8: the last batch has one element.
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
  names = tuple(_SENT)


del _InputTest  # Otherwise it would be collected too.

if __name__ == '__main__':
  tf.test.main()
