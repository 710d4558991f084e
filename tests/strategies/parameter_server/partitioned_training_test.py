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


def _function_before(table):
  function = tf.function(lambda ids: tf.reduce_mean(table(ids), 1))
  return lambda ids, apply: [rows := function(ids), apply(rows)][0]


def _concrete_function(table):
  value = table.embeddings.value
  function = tf.function(lambda ids: tf.gather(value, ids))
  function = function.get_concrete_function(tf.TensorSpec([None, 2], tf.int32))
  return lambda ids, apply: [rows := function(ids), apply(rows)][0]


_STEPS = _function_before, _concrete_function


def _own_steps(make, strategy=None):
  """Returns the last result and the table; or the error."""
  with common.scope_of(strategy):
    table = keras.layers.Embedding(9, 2, embeddings_initializer='ones')
    table.build()
    optimizer = keras.optimizers.Adagrad(0.5)
    optimizer.build(table.trainable_variables)
  look_up = make(table)
  # Traces functions outside of a step.
  for scope in (common.scope_of(None), common.scope_of(strategy)):
    with scope:
      look_up(tf.constant([[1, 2], [3, 4]]), lambda rows: rows)

  def step(ids):
    with tf.GradientTape() as tape:

      def apply(rows):
        loss = tf.reduce_sum(rows**2)
        with tape.stop_recording():
          gradients = tape.gradient(loss, table.trainable_variables)
          optimizer.apply(gradients, table.trainable_variables)

      return look_up(ids, apply)

  run = strategy.step(step, [optimizer]) if strategy else tf.function(step)
  try:
    for k in range(3):
      result = run(tf.constant([[1, 8], [k, 1]]))
  except tfs.errors.Error as error:
    return error
  getattr(strategy, 'join', int)()
  return np.asarray(result), table.get_weights()[0]


def own_steps(directory):
  """Returns for each step what it does without a strategy, and in two parts."""
  del directory
  strategy = _strategy(2)
  found = {s.__name__: [_own_steps(s), _own_steps(s, strategy)] for s in _STEPS}
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
    programs = {p.__name__: p for p in (save, load_each, own_steps)}
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
  def test_saved_state_loads_onto_other_numbers_of_parts(self, way, parts):
    self.assert_loaded(*self.found['load_each'][way, parts])

  def test_function_made_before_the_step(self):
    expected, actual = self.found['own_steps']['_function_before']
    for want, got in zip(expected, actual, strict=True):
      self.assertAllClose(want, got, 1e-6, 1e-6)
    self.assertNotAllClose(actual[1], np.ones([9, 2]))

  def test_concrete_function_is_refused(self):
    _, error = self.found['own_steps']['_concrete_function']
    self.assertIsInstance(error, tfs.errors.UnsupportedOptionError)
    self.assertIn('traced before the step', str(error))

  @parameterized.parameters('keras', 'weights', 'checkpoint')
  def test_saved_state_loads_onto_one_device(self, way):
    model = load(self.directory, way)
    self.assert_loaded(_state(model), _fit(model))


if __name__ == '__main__':
  tf.test.main()
