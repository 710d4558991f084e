"""Objects made outside the scope raise an error that names them, or train exactly."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from benchmarks import processes
from tests import tf_case, tiers, virtual_devices
from tests.programs import common
from tf_strategies import errors

virtual_devices.configure()

# Uses the class directly, because `create_strategy` loads more modules.
_PROGRAM = """
import sys
import keras, numpy as np
import tf_strategies as tfs

def make():
  return keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])

def train(model):
  model.fit(np.ones([4, 4]), np.ones([4, 1]), verbose=0)

name, program = sys.argv[1:]
strategy = getattr(tfs, name)(['CPU:0'])
model = make()
if program != 'model_outside':
  model.compile('sgd', 'mse')
if program in ('all_outside', 'baselines'):
  train(model)
if program != 'all_outside':
  with strategy.scope():
    own = model if program == 'model_outside' else make()
    own.compile('sgd', 'mse')
  train(own)
if program == 'baselines':
  train(model)
"""

_STRATEGIES = ('ring_mirrored', 'central_storage')


def _data():
  x = np.random.default_rng(0).normal(size=[16, 4]).astype(np.float32)
  return x, x[:, :1] * 2.0


def _create(name, first=0):
  devices = [virtual_devices.name(first), virtual_devices.name(first + 1)]
  return tfs.create_strategy(name, devices=devices)


def _model():
  return common.linear(4, 1)


def _fit(model):
  x, y = _data()
  return model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history


def _scope(strategy, where):
  """Returns the scope of the strategy, of another one, or of none."""
  if where == 'outside':
    return contextlib.nullcontext()
  return (
    strategy if where == 'inside' else _create('ring_mirrored', 4)
  ).scope()


def _train(model='inside', compiled='inside', fitted='outside'):
  """Returns a program that creates, compiles and fits a model in the given scopes."""

  def program(strategy):
    with _scope(strategy, model):
      made = _model()
    with _scope(strategy, compiled):
      made.compile('adam', 'mse')
    with _scope(strategy, fitted):
      _fit(made)

  return program


def layer_made_outside(strategy):
  layer = keras.layers.Dense(3, name='outer')
  layer.build([None, 4])
  with strategy.scope():
    model = keras.Sequential([keras.Input([4]), layer, keras.layers.Dense(1)])
    model.compile('adam', 'mse')
  _fit(model)


def _optimizer(made, is_built=False):
  """Returns a program with an optimizer from a scope, which may be built outside."""

  def program(strategy):
    with _scope(strategy, made):
      optimizer = keras.optimizers.Adam()
    with strategy.scope():
      model = _model()
    if is_built:
      optimizer.build(model.trainable_variables)
    with strategy.scope():
      model.compile(optimizer, 'mse')
    _fit(model)

  return program


def metric_made_outside(strategy):
  metric = keras.metrics.MeanAbsoluteError(name='outer')
  with strategy.scope():
    model = _model()
    model.compile('adam', 'mse', metrics=[metric])
  _fit(model)


def nested_scopes(strategy):
  with strategy.scope(), _create('ring_mirrored', 4).scope():
    _model()


def _step(model='inside', is_built=True, optimizer='outside'):
  """Returns a program that calls `strategy.step` with objects of the given scopes."""

  def program(strategy):
    with _scope(strategy, model):
      made = _model()
      weights = made.trainable_variables
    with _scope(strategy, optimizer):
      adam = keras.optimizers.Adam()

    def step(x):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(made(x) ** 2)
      adam.apply(tape.gradient(loss, weights), weights)
      return loss

    if is_built:
      adam.build(weights)
    strategy.step(step)(_data()[0])

  return program


_ADAM = "Adam 'adam', made outside of any scope"
_KERNEL = "variable '.*kernel'.*outside of any scope"
_TWO_STRATEGIES = 'one strategy at a time.*mixing different'
_MISTAKES = (
  (_step(), _ADAM),
  (_step(is_built=False), _ADAM),
  (_step(model='outside'), _ADAM),
  (
    _step(model='outside', is_built=False, optimizer='inside'),
    "variable '.*kernel', made outside of any scope",
  ),
  (_train(model='outside', fitted='inside'), _KERNEL),
  (_train(model='outside'), "model '.*outside of any scope"),
  (layer_made_outside, "variable '.*outer/kernel'.*outside of any scope"),
  (_train(model='outside', compiled='outside', fitted='inside'), _KERNEL),
  (_optimizer('outside'), _ADAM),
  (_optimizer('outside', is_built=True), _ADAM),
  (_optimizer('elsewhere'), "Adam 'adam', made under RingMirroredStrategy"),
  (_train(compiled='outside'), _ADAM),
  (
    metric_made_outside,
    "variable 'outer/.* of a metric, made outside of any scope",
  ),
  (nested_scopes, _TWO_STRATEGIES),
  (_train(fitted='elsewhere'), _TWO_STRATEGIES),
)


class ScopeChecksTest(tf_case.TestCase):
  def setUp(self):
    super().setUp()
    keras.backend.clear_session()

  @parameterized.parameters(*_MISTAKES)
  def test_mistake_raises(self, program, message):
    with self.assertRaisesRegex(errors.ScopeError, f'{message}(.|\n)*Fix: '):
      program(_create('ring_mirrored'))

  @parameterized.parameters(*_STRATEGIES)
  def test_unbuilt_model_with_adapted_layer_outside_is_exact(self, name):
    x, _ = _data()
    normal = keras.layers.Normalization()
    normal.adapt(x)
    found = []
    for strategy in (tf.distribute.get_strategy(), _create(name)):
      keras.utils.set_random_seed(1)
      model = keras.Sequential([normal, keras.layers.Dense(1)])
      with strategy.scope():
        model.compile('sgd', 'mse')
        losses = _fit(model)['loss']
      found.append([*losses, *model.get_weights()[-2:]])
    for want, got in zip(*found, strict=True):
      self.assertAllClose(want, got, 1e-6, 1e-6)

  def test_nested_scope_and_prediction_of_an_outer_model(self):
    strategy = _create('ring_mirrored')
    with strategy.scope(), strategy.scope():
      model = _model()
      model.compile('sgd', 'mse')
      self.assertLen(_fit(model)['loss'], 1)
    outer = _model()
    x, _ = _data()
    with strategy.scope():
      predicted = outer.predict(x, verbose=0)
    self.assertAllClose(predicted, outer(x), 1e-6, 1e-6)

  @tiers.product(
    name=('RingMirroredStrategy', tiers.soak('CentralStorageStrategy')),
    program=('model_outside', 'all_outside', 'baselines'),
  )
  def test_missing_scope_is_reported_for_strategy_classes(self, name, program):
    done = processes.run_python('-c', _PROGRAM, name, program)
    output = done.stdout + done.stderr
    is_mistake = program == 'model_outside'
    self.assertEqual(bool(done.returncode), is_mistake, output)
    self.assertEqual("got model 'sequential'" in output, is_mistake, output)
    # One warning, at the end of the program.
    warnings = [line for line in output.splitlines() if 'never entered' in line]
    self.assertLen(warnings, int(program == 'all_outside'), output)
    if warnings:
      self.assertIn(f'the scope of {name} was never entered', warnings[0])


if __name__ == '__main__':
  tf.test.main()
