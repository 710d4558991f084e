"""Custom loops and variables on real servers with two workers."""

import contextlib
import functools
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests.strategies.parameter_server import chief
from tf_strategies import errors

partitioners = tf.distribute.experimental.partitioners


def steps_of_a_loop(strategy):
  with strategy.scope():
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.0)
    offset = tf.Variable(
      2.0
    )  # A TensorFlow variable in addition to Keras variables.
    trained = [*model.trainable_variables, offset]
    optimizer.build(trained)
    rows = tf.Variable(0, dtype=tf.int64, trainable=False)

  @tf.function
  def train(x):
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean((model(x) + offset) ** 2)
    optimizer.apply(tape.gradient(loss, trained), trained)
    # A loop for AutoGraph. Both workers may add at the same time.
    for _ in tf.range(1):
      rows.assign_add(tf.shape(x, tf.int64)[0])
    return {'loss': loss}

  step = strategy.step(train, [optimizer])
  inputs = np.random.default_rng(0).normal(size=[40, 6, 3]).astype(np.float32)
  for x in inputs:
    loss = step(x)['loss']
  strategy.join()
  # The step counter survives a write by the chief.
  offset.assign(2.0)
  result = strategy.step(model)(inputs[0])
  return {
    'loss': float(loss),  # From one of the last steps.
    'losses': [float(np.mean((model(x) + 2.0) ** 2)) for x in inputs],
    'result': result,
    'expected': model(inputs[0]).numpy(),
    'counts': (int(optimizer.iterations.numpy()), int(rows.numpy())),
  }


def tensorflow_coordinator(strategy):
  """Runs a loop of TensorFlow: schedule, join, create_per_worker_dataset."""
  coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
  with strategy.scope():
    weight = tf.Variable([[1.0], [2.0]], name='weight')
    counter = tf.Variable(0, dtype=tf.int64, trainable=False)
    total = tf.Variable(0.0, trainable=False)

  def dataset_fn(context=None):
    del context
    return tf.data.Dataset.from_tensors(tf.ones([4, 2])).repeat()

  @tf.function
  def per_worker(iterator):
    def replica(x):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(x @ weight)
      weight.assign_sub(0.01 * tape.gradient(loss, weight))
      counter.assign_add(1)
      total.assign(total + 1.0)
      return loss

    return strategy.run(replica, args=(next(iterator),))

  found = []
  for source in (
    dataset_fn,
    lambda: strategy.distribute_datasets_from_function(dataset_fn),
    lambda: strategy.experimental_distribute_dataset(dataset_fn()),
    dataset_fn(),
    strategy.distribute_datasets_from_function(dataset_fn),
    strategy.experimental_distribute_dataset(dataset_fn()),
  ):
    iterator = iter(coordinator.create_per_worker_dataset(source))
    results = [coordinator.schedule(per_worker, (iterator,)) for _ in range(15)]
    coordinator.join()
    assert coordinator.done()
    losses = [float(r.fetch()) for r in results]
    counts = int(counter.numpy()), float(total.numpy())
    found.append((counts, weight.numpy(), losses))
  return found


def variables_of_functions(strategy):
  """Creates variables in the first calls of a module and of a function."""

  class Lazy(tf.Module):
    def __init__(self):
      super().__init__()
      self.kernel = None

    @tf.function
    def __call__(self, x):
      if self.kernel is None:
        self.kernel = tf.Variable(2 * tf.eye(3), name='kernel')
        self.bias = tf.Variable(
          lambda: tf.ones([3]), shape=[3], dtype='float32'
        )
        self.calls = tf.Variable(0.0, name='calls')
      self.calls.assign_add(1.0)
      return x @ self.kernel + self.bias

  with strategy.scope():
    module = Lazy()
    results = [module(tf.ones([1, 3])).numpy().tolist() for _ in range(2)]
    made = (module.kernel, module.bias, module.calls)
    kinds = [[p.server for p in v.parts] for v in made]

    @tf.function
    def depends(x):
      return tf.Variable(x + 1).read_value()

    try:
      message = str(depends(tf.ones([2])))
    except errors.UnsupportedOptionError as e:
      message = str(e)
  return results, kinds, float(module.calls.numpy()), message


def function_traced_before_a_step(strategy):
  """Returns a partitioned table after a step that calls such a function."""
  with strategy.scope():
    table = tf.Variable(tf.reshape(tf.range(10.0), [5, 2]))
  look_up = tf.function(lambda ids: tf.gather(table, ids))
  look_up(tf.constant([1, 2]))

  def train(ids):
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(look_up(ids) ** 2)
    table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))

  strategy.step(train)(np.array([4, 0], np.int32))
  strategy.join()
  return table.numpy()


def restored_before_creation(strategy):
  """Returns partitioned variables that were created with values of a checkpoint."""
  with strategy.scope():
    saved = tf.Module()
    saved.table = tf.Variable(tf.reshape(tf.range(10.0), [5, 2]))
    path = tf.train.Checkpoint(saved).save(tempfile.mkdtemp() + '/before')
    module = tf.Module()
    status = tf.train.Checkpoint(module).restore(path)
    module.table = tf.Variable(tf.zeros([5, 2]))
    status.assert_consumed()
    found = [module.table]
    deferred = tf.Module()
    status = tf.train.Checkpoint(deferred).restore(path)
    # A TensorFlow layer reads the value like this before it creates a variable.
    value = deferred._preload_simple_restoration('table')
    found.append(tf.Variable(value, shape=[5, 2], dtype=tf.float32))
    found.append(tf.Variable(value))
  return [v.numpy() for v in found], [len(v.parts) for v in found]


def run(program, parts):
  """Returns the result of a program on servers with partitioned variables."""
  keras.backend.clear_session()
  with contextlib.closing(
    tfs.ParameterServerStrategy(
      variable_partitioner=partitioners.FixedShardsPartitioner(parts)
    )
  ) as strategy:
    return program(strategy)


# Programs, and the number of parts of their variables.
_PROGRAMS = {
  steps_of_a_loop: 1,
  tensorflow_coordinator: 1,
  variables_of_functions: 2,
  function_traced_before_a_step: 2,
  restored_before_creation: 2,
}


class ServersTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.found = chief.Programs(
      {
        program.__name__: functools.partial(run, program, parts)
        for program, parts in _PROGRAMS.items()
      }
    )

  def test_steps_of_a_custom_loop(self):
    found = self.found['steps_of_a_loop']
    self.assertLess(
      np.abs(np.subtract(found['losses'], found['loss'])).min(), 1e-5
    )
    self.assertAllClose(found['result'], found['expected'], 1e-6, 1e-6)
    self.assertEqual(found['counts'], (40, 240))

  def test_tensorflow_coordinator_applies_all_steps(self):
    found = self.found['tensorflow_coordinator']
    self.assertLen(found, 6)
    for i, (counts, weight, losses) in enumerate(found):
      steps = 15 * (i + 1)
      self.assertEqual(counts, (steps, steps))
      # The gradient is 1 for any weight.
      self.assertAllClose(
        weight, [[1.0 - 0.01 * steps], [2.0 - 0.01 * steps]], 1e-5, 1e-5
      )
      self.assertLen(losses, 15)
      self.assertLess(max(losses), 3.001)

  def test_variables_created_in_functions(self):
    results, servers, calls, message = self.found['variables_of_functions']
    self.assertEqual(results, [[[3.0, 3.0, 3.0]]] * 2)
    self.assertEqual(servers, [[0, 1], [1, 1], [0]])
    self.assertEqual(calls, 2)
    self.assertIn('does not depend on the arguments', message)

  def test_function_traced_before_a_step(self):
    want = np.arange(10.0).reshape([5, 2])
    want[[4, 0]] *= -1
    self.assertAllEqual(self.found['function_traced_before_a_step'], want)

  def test_partitioned_variables_restored_before_creation(self):
    values, parts = self.found['restored_before_creation']
    self.assertAllEqual(values, [np.arange(10.0).reshape([5, 2])] * 3)
    self.assertEqual(parts, [2] * 3)


if __name__ == '__main__':
  tf.test.main()
