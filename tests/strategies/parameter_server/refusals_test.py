"""Steps that workers cannot run are refused at once, with an error that names the reason."""

import functools
import os
import traceback
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests.strategies.parameter_server import chief


def _data():
  x = np.random.default_rng(0).normal(size=[16, 4]).astype(np.float32)
  return x, x[:, :1]


def _model(strategy, make=keras.Sequential, optimizer='sgd', hidden=()):
  with strategy.scope():
    model = make([keras.Input([4]), *hidden, keras.layers.Dense(1)])
    model.compile(optimizer, 'mse')
  return model


def _run(strategy, step):
  strategy.step(step)(np.ones([4], np.float32))
  strategy.join()


def jit_compile(strategy):
  gpu = tf.config.PhysicalDevice('/physical_device:GPU:0', 'GPU')
  # Keras lists the devices to resolve 'auto'.
  with mock.patch.object(
    tf.config, 'list_physical_devices', lambda kind=None: [gpu]
  ):
    model = _model(strategy)
  assert not model.jit_compile
  model.fit(*_data(), verbose=0)
  with strategy.scope():
    model.compile('sgd', 'mse', jit_compile=True)
  model.fit(*_data(), verbose=0)


def python_in_a_step(strategy):
  """Calls a Python function, which workers do not have."""

  def step(x):
    return tf.ensure_shape(tf.numpy_function(np.sum, [x], tf.float32), [])

  _run(strategy, step)


def none_in_the_result_of_a_step(strategy):
  _run(strategy, lambda x: {'sum': tf.reduce_sum(x), 'count': None})


def next_in_a_function(strategy):
  """Would pass the first batch, a constant of the trace, to each step."""
  dataset = tf.data.Dataset.from_tensor_slices(_data()).batch(4)
  iterator = iter(strategy.experimental_distribute_dataset(dataset))

  @tf.function
  def step(iterator):
    return strategy.run(lambda b: tf.reduce_sum(b[0]), (next(iterator),))

  return step(iterator)


def loop_in_a_function(strategy):
  dataset = strategy.distribute_datasets_from_function(
    lambda context: tf.data.Dataset.from_tensor_slices(_data()).batch(4)
  )

  @tf.function
  def epoch(dataset):
    for batch in dataset:
      strategy.run(lambda b: tf.reduce_sum(b[0]), (batch,))

  epoch(dataset)


class OwnTrainFunction(keras.Sequential):
  """A model whose own train function would run steps on the chief."""

  def make_train_function(self, force=False):
    self.train_function = lambda iterator: self.train_step(next(iterator))


def own_train_function(strategy):
  _model(strategy, OwnTrainFunction).fit(*_data(), verbose=0)


class WrappedTrainFunction(keras.Sequential):
  """A model that counts the calls of its train function."""

  calls = 0

  def make_train_function(self, force=False):
    super().make_train_function(force)
    function = self.train_function

    def counted(iterator):
      self.calls += 1
      return function(iterator)

    self.train_function = counted


def wrapped_train_function(strategy):
  """Returns the number of calls and the number of steps on workers."""
  model = _model(strategy, WrappedTrainFunction)
  model.fit(*_data(), batch_size=8, verbose=0)
  strategy.join()
  return model.calls, strategy.report()['steps']


def metric_made_outside(strategy):
  metric = keras.metrics.Mean(name='outer')
  with strategy.scope():
    weight = tf.Variable(1.0)

  def evaluate(x):
    metric.update_state(x * weight)
    return metric.result()

  _run(strategy, evaluate)


def optimizer_made_outside(strategy):
  model = _model(strategy, optimizer=keras.optimizers.Adam())
  model.fit(*_data(), verbose=0)


def data_made_before(strategy):
  """Uses data on a device that connecting has renamed: TensorFlow cannot find it."""
  _model(strategy).fit(_made_before[0], verbose=0)


def data_made_outside(strategy):
  """Checks that this is not refused: workers get the dataset itself."""
  dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0]).batch(2)
  data = strategy.distribute_datasets_from_function(lambda context: dataset)
  step = strategy.step(tf.reduce_sum)
  for batch in data:
    step(batch)
  strategy.join()


def adapted_outside(strategy):
  """Checks that this is not refused: workers only read the adapted values."""
  x, y = _data()
  layer = keras.layers.Normalization()
  layer.adapt(x)
  found = []
  for each in (tf.distribute.get_strategy(), strategy):
    keras.utils.set_random_seed(2)
    model = _model(each, hidden=[layer])
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    found.append([history.history['loss'][0], *model.get_weights()[-2:]])
  for want, got in zip(*found, strict=True):
    np.testing.assert_allclose(want, got, 1e-6, 1e-6)


class Checked(keras.layers.Layer):
  """A layer that fails on a worker if the sum is one or more."""

  def call(self, x):
    check = tf.debugging.assert_less(tf.reduce_sum(x), 1.0, 'too much')
    with tf.control_dependencies([check]):
      return tf.identity(x)


def step_that_fails(strategy):
  """Runs a failing step in the first `fit`, and after a `fit` that succeeds.

  Returns, for each error, its type, its message and the files of its traceback.
  """
  model = _model(strategy, hidden=[Checked()])
  x, y = _data()
  found = []
  for succeeds_before in (False, True):
    if succeeds_before:
      model.fit(0 * x, y, verbose=0)
    try:
      model.fit(np.ones_like(x), y, verbose=0)
    except Exception as e:
      files = [f.filename for f in traceback.extract_tb(e.__traceback__)]
      found.append((type(e).__name__, str(e), files))
  return found


_REFUSED = {
  python_in_a_step: 'tf.numpy_function or tf.py_function.*in the tf.data',
  none_in_the_result_of_a_step: "returns {'sum.*'count': None}.*leave out",
  jit_compile: 'jit_compile=False of model.*jit_compile=True.*jit_compile=False',
  next_in_a_function: r'next\(iterator\) inside a tf.function.*strategy.step',
  loop_in_a_function: 'a distributed data set inside a tf.function.*strategy.step',
  own_train_function: 'make_train_function.*another one in model.*override train_step',
  metric_made_outside: "the strategy's scope, got variable '.*outer.*outside of it",
  optimizer_made_outside: "Adam 'adam', made outside of any scope",
  data_made_before: 'made after the strategy, got one .*made before.*Fix: make',
}


_made_before = []


def make_data():
  """Creates a dataset before this process is connected."""
  _made_before.append(tf.data.Dataset.from_tensor_slices(_data()).batch(4))


def run(program):
  """Returns the result of a program, or the text of its error."""
  strategy = tfs.create_strategy('parameter_server', mode='sync')
  try:
    keras.backend.clear_session()
    return program(strategy) or ''
  except tfs.errors.UnsupportedOptionError as e:
    return str(e)
  finally:
    strategy.close()


class RefusalsTest(tf.test.TestCase, parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    programs = (
      *_REFUSED,
      adapted_outside,
      data_made_outside,
      step_that_fails,
      wrapped_train_function,
    )
    runs = {p.__name__: functools.partial(run, p) for p in programs}
    cls.found = chief.Programs({'make_data': make_data, **runs}, num_ps=1)

  @parameterized.named_parameters((p.__name__, p) for p in _REFUSED)
  def test_unsupported_step_is_refused(self, program):
    self.assertRegex(self.found[program.__name__], _REFUSED[program])

  def test_supported_steps_succeed(self):
    self.assertEqual(self.found['adapted_outside'], '')
    self.assertEqual(self.found['data_made_outside'], '')

  def test_wrapped_train_function_trains_on_workers(self):
    self.assertEqual(self.found['wrapped_train_function'], (2, 2))

  def test_failing_step_raises_a_short_error(self):
    found = self.found['step_that_fails']
    self.assertLen(found, 2)
    for name, message, files in found:
      self.assertEqual(name, 'InvalidArgumentError')
      self.assertIn('too much', message)
      # Checks the operation: TensorFlow does not always keep its source line.
      self.assertIn('/assert_less/', message)
      # TensorFlow lists the error once or twice: for each of two servers.
      self.assertLess(len(message.splitlines()), 25, message)
      self.assertIn(__file__, files)
      package = os.path.join(os.path.dirname(tfs.__file__), '')
      # Keras does not filter the innermost frame.
      ours = [f for f in files[:-1] if f.startswith(package)]
      self.assertEqual(ours, [])


if __name__ == '__main__':
  tf.test.main()
