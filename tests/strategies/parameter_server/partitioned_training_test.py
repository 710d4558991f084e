"""Models with variables in parts train, save and load like whole ones."""

import contextlib
import os
import tempfile

import keras
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case
from tests.programs import common
from tests.strategies.parameter_server import chief

_ROWS = 69

partitioners = tf.distribute.experimental.partitioners


_LOADS = (('keras', 3), ('weights', 1), ('checkpoint', 3))


def _strategy(parts):
  """Returns a strategy that cuts every variable into `parts`."""
  return tfs.ParameterServerStrategy(
    variable_partitioner=partitioners.FixedShardsPartitioner(parts)
  )


def _model(strategy=None):
  with common.scope_of(strategy):
    return common.compiled(
      common.embedding_model, lambda: keras.optimizers.Adam(1e-2)
    )


def _fit(model, epochs=1):
  common.fit(model, *common.tokens(_ROWS), epochs=epochs, shuffle=False)
  return common.state_of(model)


def save(directory):
  """Trains with variables in two parts, and saves in every format."""
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
    with contextlib.closing(_strategy(parts)) as strategy:
      model = load(directory, way, strategy)
      found[way, parts] = common.state_of(model), _fit(model)
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


class PartitionedTrainingTest(tf_case.TestCase):
  """Loads models saved in parts; `programs_test.py` covers training in parts."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    programs = {p.__name__: p for p in (save, load_each)}
    cls.found = chief.Programs(
      programs, [cls.directory], num_workers=1, num_ps=3
    )

  def assert_loaded(self, found, then):
    for expected, actual, limit in zip(
      self.found['save'], (found, then), (0, 1e-6), strict=True
    ):
      tf.nest.assert_same_structure(expected, actual)
      self.assertAllClose(expected, actual, 0, limit)

  @parameterized.parameters(*_LOADS)
  def test_saved_state_loads(self, way, parts):
    """Checks other numbers of parts and one device."""
    self.assert_loaded(*self.found['load_each'][way, parts])
    model = load(self.directory, way)
    self.assert_loaded(common.state_of(model), _fit(model))


if __name__ == '__main__':
  tf.test.main()
