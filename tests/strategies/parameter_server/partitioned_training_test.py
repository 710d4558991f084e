"""Models with variables in parts train, save and load like whole ones."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tests.programs import common
from tests.strategies.parameter_server import chief

_ROWS = 69

partitioners = tf.distribute.experimental.partitioners


_LOADS = (('keras', 3), ('weights', 1), ('checkpoint', 3))


def _strategy(parts):
  """A strategy that cuts every variable; one part cuts none."""
  partitioner = partitioners.FixedShardsPartitioner(parts)
  return tfs.ParameterServerStrategy(
    variable_partitioner=partitioner if parts > 1 else None
  )


def _model(strategy=None):
  with common.scope_of(strategy):
    return common.compiled(
      common.embedding_model, lambda: keras.optimizers.Adam(1e-2)
    )


def _fit(model, epochs=1):
  x, y = common.tokens(_ROWS)
  model.fit(x, y, batch_size=32, epochs=epochs, shuffle=False, verbose=0)
  return _state(model)


def _state(model):
  weights = [np.asarray(w) for w in model.get_weights()]
  return weights, [v.numpy() for v in model.optimizer.variables]


def save(directory):
  """Trains in two parts, and saves in every way."""
  strategy = _strategy(2)
  model = _model(strategy)
  state = _fit(model, 2)
  model.save(os.path.join(directory, 'model.keras'))
  model.save_weights(os.path.join(directory, 'model.weights.h5'))
  tf.train.Checkpoint(model=model).save(os.path.join(directory, 'ckpt'))
  return state, _fit(model)


def load_each(directory):
  """Returns the loaded state and the further training of each row of `_LOADS`."""
  found = {}
  for way, parts in _LOADS:
    strategy = _strategy(parts)
    try:
      model = load(directory, way, strategy)
      found[way, parts] = _state(model), _fit(model)
    finally:
      strategy.close()
  return found


def load(directory, way, strategy=None):
  """Returns a model with the saved state, loaded in the given way."""
  if way == 'keras':
    with common.scope_of(strategy):
      return keras.models.load_model(os.path.join(directory, 'model.keras'))
  model = _model(strategy)
  with common.scope_of(strategy):
    model.optimizer.build(model.trainable_variables)
  if way == 'weights':
    model.load_weights(os.path.join(directory, 'model.weights.h5'))
  else:
    path = tf.train.latest_checkpoint(directory)
    status = tf.train.Checkpoint(model=model).restore(path)
    status.assert_existing_objects_matched()
  return model


class PartitionedTrainingTest(tf.test.TestCase, parameterized.TestCase):
  """Loads models saved in parts; `programs_test.py` covers training in parts."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    programs = {p.__name__: p for p in (save, load_each)}
    with parameter_servers.Job(num_workers=1, num_ps=3) as job:
      cls.found = chief.Programs(job, programs, (cls.directory,))

  def assert_loaded(self, found, then):
    for expected, actual, limit in zip(
      self.found['save'], (found, then), (0, 1e-6), strict=True
    ):
      for want, got in zip(expected, actual, strict=True):
        self.assertLen(got, len(want))
        for a, b in zip(want, got, strict=True):
          self.assertAllClose(a, b, 0, limit)

  @parameterized.parameters(*_LOADS)
  def test_saved_state_loads(self, way, parts):
    """Checks other numbers of parts, and one device."""
    self.assert_loaded(*self.found['load_each'][way, parts])
    model = load(self.directory, way)
    self.assert_loaded(_state(model), _fit(model))


if __name__ == '__main__':
  tf.test.main()
