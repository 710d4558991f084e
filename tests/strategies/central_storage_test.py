"""CentralStorageStrategy keeps one copy and writes it once, on the parameter device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices

virtual_devices.configure()

COMPUTE = virtual_devices.names(4)[1:]
PARAMETERS = virtual_devices.name(5)


def _full(name):
  return f'/job:localhost/replica:0/task:0/device:{name}'


def _strategy():
  return tfs.CentralStorageStrategy(COMPUTE, PARAMETERS)


def _replica_number():
  context = tf.distribute.get_replica_context()
  return tf.cast(context.replica_id_in_sync_group, tf.float32)


class VariablesTest(tf_case.TestCase):
  def setUp(self):
    super().setUp()
    self.strategy = _strategy()

  @pytest.mark.smoke
  def test_one_copy_on_the_parameter_device(self):
    with self.strategy.scope():
      v = tf.Variable([1.0, 2.0])
      with self.strategy.extended.colocate_vars_with(v):
        slot = tf.Variable([0.0, 0.0], trainable=False)
    for variable in (v, slot):
      self.assertLen(variable.values, 1)
      self.assertEqual(variable.values[0].device, _full(PARAMETERS))
    self.assertEqual(self.strategy.parameter_device, _full(PARAMETERS))

  @parameterized.parameters(
    ('NONE', 10.0, tf.function),  # The first replica's write, applied once.
    ('ONLY_FIRST_REPLICA', 10.0, tf.function),
    ('MEAN', 11.0, tf.function),
    ('SUM', 33.0, tf.function),
    ('SUM', 33.0, lambda step: step),
  )
  def test_write_in_replicas_is_applied_once(self, name, want, wrap):
    with self.strategy.scope():
      v = tf.Variable(0.0, aggregation=getattr(tf.VariableAggregation, name))

    def replica_step():
      before = v.read_value()
      v.assign_add(10.0 + _replica_number())
      return before

    step = wrap(lambda: self.strategy.run(replica_step))
    for count in range(3):
      # No replica reads a value that another one wrote in the same step.
      for before in self.strategy.experimental_local_results(step()):
        self.assertAllClose(before, count * want)
    self.assertAllClose(v.numpy(), 3 * want)

  def test_mean_inside_a_branch_is_refused(self):
    with self.strategy.scope():
      v = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def replica_step():
      tf.cond(
        tf.constant(True), lambda: v.assign(2.0).read_value(), v.read_value
      )

    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'strategy.step'
    ):
      tf.function(lambda: self.strategy.run(replica_step))()
    self.assertAllClose(v.numpy(), 1.0)


class OptimizerTest(tf_case.TestCase):
  @pytest.mark.smoke
  def test_update_runs_once_on_the_parameter_device(self):
    strategy = _strategy()
    updates = []

    class Counting(keras.optimizers.SGD):
      def update_step(self, gradient, variable, learning_rate):
        updates.append((variable.device, gradient.device))
        super().update_step(gradient, variable, learning_rate)

    with strategy.scope():
      v = keras.Variable([1.0, 2.0], name='v')
      optimizer = Counting(0.5)
      optimizer.build([v])

    def replica_step():
      optimizer.apply([tf.ones([2]) * (1.0 + _replica_number())], [v])

    step = tf.function(lambda: strategy.run(replica_step))
    step()
    # The sum of 1, 2 and 3, applied once.
    self.assertAllClose(v.numpy(), [-2.0, -1.0])
    self.assertEqual(updates, [(_full(PARAMETERS), _full(PARAMETERS))])
    step()
    self.assertAllClose(v.numpy(), [-5.0, -4.0])
    self.assertLen(updates, 1)  # Traced once.

  def test_gradients_are_only_reduced_to_the_parameter_device(self):
    steps = 2
    strategy = _strategy()
    with strategy.scope():
      model = keras.Sequential([keras.Input([5]), keras.layers.Dense(7)])
      model.compile('adam', 'mse')
    x = np.ones([12 * steps, 5], np.float32)
    model.fit(x, np.ones([len(x), 7]), batch_size=12, verbose=0)
    num_bytes = 4 * model.count_params()
    report = strategy.communication_report()
    self.assertEqual(report['cross_device_ops'], 'AutoAllReduce')
    self.assertEqual(report['calls']['all_reduce'], 0)
    self.assertEqual(
      report['reduce_bytes_in'][_full(PARAMETERS)],
      steps * len(COMPUTE) * num_bytes,
    )

  def test_compiled_write_may_read_a_replicated_variable(self):
    """Checks that XLA does not read copies on a device other than that of the write."""

    class Recording(keras.layers.Layer):
      """Adds its seed to a weight."""

      def build(self, shape):
        self.seed = keras.random.SeedGenerator(1)
        self.recorded = self.add_weight(shape=[2], trainable=False)

      def call(self, x):
        seed = keras.ops.cast(self.seed.state.value, 'float32')
        self.recorded.assign(self.recorded * 0.5 + 1e-3 * seed)
        return x

    found = []
    for strategy in (tf.distribute.get_strategy(), _strategy()):
      keras.utils.set_random_seed(1)
      with strategy.scope():
        model = keras.Sequential(
          [keras.Input([4]), Recording(), keras.layers.Dense(1)]
        )
        model.compile('sgd', 'mse', jit_compile=True)
      x = np.arange(48, dtype=np.float32).reshape(12, 4) / 48.0
      model.fit(x, x[:, :1], batch_size=6, verbose=0)
      found.append(model.get_weights())
    for want, got in zip(*found, strict=True):
      self.assertAllClose(want, got, 1e-6, 1e-6)


class DevicesTest(tf.test.TestCase):
  def test_defaults(self):
    strategy = tfs.CentralStorageStrategy()
    self.assertEqual(strategy.parameter_device, _full(virtual_devices.HOST))
    self.assertEqual(
      strategy.num_replicas_in_sync,
      len(tf.config.list_logical_devices(virtual_devices.KIND)),
    )

  def test_bad_device_is_refused(self):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, 'CPU:99'):
      tfs.CentralStorageStrategy(parameter_device='CPU:99')


if __name__ == '__main__':
  tf.test.main()
