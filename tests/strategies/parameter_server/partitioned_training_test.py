"""Models with variables in parts train, save and load like whole ones."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tests.conformance import harness, parameter_server
from tests.conformance.harness import Feature
from tests.strategies.parameter_server import chief

_ROWS = 69
_TOKENS = 23  # Not a multiple of 2 or 3.

optimizers = keras.optimizers
partitioners = tf.distribute.experimental.partitioners


def _tokens(rows):
  rng = np.random.default_rng(3)
  return rng.integers(0, _TOKENS, (rows, 5)), rng.integers(0, 10, rows)


def _model():
  layers = keras.layers
  return keras.Sequential(
    [
      layers.Input([5], dtype='int32'),
      layers.Embedding(_TOKENS, 4),
      layers.Flatten(),
      layers.Dense(7, activation='tanh'),
      layers.Dense(10, dtype='float32'),
    ]
  )


def _feature(name, optimizer, **options):
  return Feature(
    name,
    rows=_ROWS,
    model=_model,
    data=_tokens,
    optimizer=optimizer,
    **options,
  )


# `conformance/recommender_test.py` has the optimizers.
_FEATURES = {
  f.name: f
  for f in (
    _feature('adam', lambda: optimizers.Adam(1e-2)),
    _feature(
      'mixed_float16',
      lambda: optimizers.SGD(0.05),
      policy='mixed_float16',
      tolerance=2e-3,
    ),
  )
}
_LOADS = (('keras', 3), ('weights', 1), ('checkpoint', 3))


def _strategy(parts):
  """A strategy that cuts every variable; one part cuts none."""
  partitioner = partitioners.FixedShardsPartitioner(parts)
  return tfs.ParameterServerStrategy(
    variable_partitioner=partitioner if parts > 1 else None
  )


def train_features(names, parts):
  """Results of features, and where the parts of the table are."""
  found = {}
  for name in names:
    feature = _FEATURES[name]
    strategy = _strategy(parts)
    try:
      result = harness.train(feature, strategy)
      table = result.model.layers[0].embeddings.value
      found[name] = (
        parameter_server.ServerResult(
          result.weights,
          result.optimizer_state,
          result.history,
          result.evaluation,
          result.predictions,
        ),
        [p.device for p in table.parts],
        [p.shape.as_list() for p in table.parts],
      )
    finally:
      strategy.close()
  return found


def two_parts(directory):
  return train_features(_FEATURES, 2)


def three_parts(directory):
  return train_features(_FEATURES, 3)


def _fit(model, epochs=1):
  x, y = _tokens(_ROWS)
  model.fit(x, y, batch_size=32, epochs=epochs, shuffle=False, verbose=0)
  return _state(model)


def _state(model):
  weights = [np.asarray(w) for w in model.get_weights()]
  return weights, [v.numpy() for v in model.optimizer.variables]


def save(directory):
  """Trains in two parts, and saves in every way."""
  strategy = _strategy(2)
  model = harness.build(_FEATURES['adam'], strategy)
  state = _fit(model, 2)
  model.save(os.path.join(directory, 'model.keras'))
  model.save_weights(os.path.join(directory, 'model.weights.h5'))
  tf.train.Checkpoint(model=model).save(os.path.join(directory, 'ckpt'))
  return state, _fit(model)


def load_elsewhere(directory):
  return load_each(directory, _LOADS)


def load_each(directory, loads):
  """What each way to load, onto a number of parts, gives and goes on to."""
  found = {}
  for way, parts in loads:
    strategy = _strategy(parts)
    try:
      model = load(directory, way, strategy)
      found[way, parts] = _state(model), _fit(model)
    finally:
      strategy.close()
  return found


def load(directory, way, strategy=None):
  """A model with what was saved."""
  if way == 'keras':
    with harness.scope_of(strategy):
      return keras.models.load_model(os.path.join(directory, 'model.keras'))
  model = harness.build(_FEATURES['adam'], strategy)
  with harness.scope_of(strategy):
    model.optimizer.build(model.trainable_variables)
  if way == 'weights':
    model.load_weights(os.path.join(directory, 'model.weights.h5'))
  else:
    path = tf.train.latest_checkpoint(directory)
    status = tf.train.Checkpoint(model=model).restore(path)
    status.assert_existing_objects_matched()
  return model


class _TrainingTest(harness.ConformanceTest, parameterized.TestCase):
  programs = ()

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    programs = {p.__name__: p for p in cls.programs}
    with parameter_servers.Job(num_workers=1, num_ps=3) as job:
      cls.found = chief.Programs(job, programs, (cls.directory,))

  def assert_training(self, program, name, count):
    result, devices, shapes = self.found[program][name]
    feature = _FEATURES[name]
    self.assert_results(harness.train(feature), result, feature.tolerance)
    self.assertLen(set(devices), count)
    self.assertTrue(all('/job:ps/' in d for d in devices))
    self.assertEqual(sum(rows for rows, _ in shapes), _TOKENS)

  def assert_loaded(self, found, then):
    saved, continued = self.found['save']
    self.assert_same_state(saved, found, 0)
    self.assert_same_state(continued, then, 1e-6)

  def assert_same_state(self, expected, actual, tolerance):
    for want, got in zip(expected, actual, strict=True):
      self.assertLen(got, len(want))
      for a, b in zip(want, got, strict=True):
        self.assertAllClose(a, b, 0, tolerance)


class PartitionedTrainingTest(_TrainingTest):
  programs = (two_parts, three_parts, save, load_elsewhere)

  @parameterized.parameters(*[[name] for name in _FEATURES])
  def test_training_equals_one_device(self, name):
    self.assert_training('two_parts', name, 2)
    self.assert_training('three_parts', name, 3)

  @parameterized.parameters(*_LOADS)
  def test_saved_state_loads_onto_other_numbers_of_parts(self, way, parts):
    self.assert_loaded(*self.found['load_elsewhere'][way, parts])

  @parameterized.parameters('keras', 'weights', 'checkpoint')
  def test_saved_state_loads_onto_one_device(self, way):
    model = load(self.directory, way)
    self.assert_loaded(_state(model), _fit(model))


del _TrainingTest  # Else it would be collected too.

if __name__ == '__main__':
  tf.test.main()
