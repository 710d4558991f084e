"""RingMirroredStrategy reduces with its own op only, and rejects bad devices."""

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices

virtual_devices.configure()

SUM = tf.distribute.ReduceOp.SUM
DEVICES = tuple(virtual_devices.names(4))
OURS = [
  tfs.RingMirroredStrategy,
  tfs.CentralStorageStrategy,
  lambda devices: tfs.MultiWorkerRingStrategy(devices=devices),
]


def _strategy(cross_device_ops=None):
  return tfs.RingMirroredStrategy(list(DEVICES), cross_device_ops)


class RoutingTest(tf.test.TestCase):
  """Every way to reduce uses the strategy's op, never TensorFlow's."""

  def setUp(self):
    super().setUp()
    self.ops = tfs.RingAllReduce()
    self.strategy = _strategy(self.ops)

  def test_all_reduce_in_replica_context(self):
    @tf.function
    def step():
      def replica_fn():
        context = tf.distribute.get_replica_context()
        i = context.replica_id_in_sync_group
        return context.all_reduce(SUM, [i, i + tf.range(2)])

      return self.strategy.run(replica_fn)

    for _ in range(3):
      results = step()
    for replica in range(4):
      scalar, vector = (r.values[replica] for r in results)
      self.assertAllEqual(scalar, 6)
      self.assertAllEqual(vector, [6, 10])
    # Counts executions, not traces.
    self.assertEqual(self.ops.calls, 3)

  @pytest.mark.smoke
  def test_reduce_and_gather(self):
    def replica_fn():
      i = tf.distribute.get_replica_context().replica_id_in_sync_group
      return tf.fill([1 + tf.cast(i > 1, tf.int32), 2], i)

    values = self.strategy.run(replica_fn)
    gathered = self.strategy.gather(values, axis=0)
    self.assertAllEqual(gathered[:, 0], [0, 1, 2, 2, 3, 3])
    scalars = self.strategy.run(lambda: replica_fn()[0])
    self.assertAllEqual(self.strategy.reduce(SUM, scalars, axis=None), [6, 6])
    calls = self.ops.report()['calls']
    self.assertEqual((calls['gather'], calls['reduce']), (1, 1))

  @pytest.mark.smoke
  def test_variable_aggregation_and_broadcast(self):
    with self.strategy.scope():
      total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
      first = tf.Variable(
        0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
      )

    @tf.function
    def step():
      def replica_fn():
        i = tf.distribute.get_replica_context().replica_id_in_sync_group
        total.assign_add(tf.cast(i + 1, tf.float32))
        first.assign(i + 5)

      self.strategy.run(replica_fn)

    step()
    self.assertAllEqual([v.numpy() for v in total.values], [10.0] * 4)
    self.assertAllEqual([v.numpy() for v in first.values], [5] * 4)
    calls = self.ops.report()['calls']
    self.assertEqual((calls['all_reduce'], calls['broadcast']), (1, 1))


class Scaled(keras.optimizers.SGD):
  def apply(self, grads, trainable_variables=None, scale=1.0):
    super().apply([g * scale for g in grads], trainable_variables)


class OwnOptimizerTest(tf.test.TestCase):
  def test_arguments_of_apply(self):
    strategy = _strategy()
    with strategy.scope():
      variable, optimizer = tf.Variable(1.0), Scaled(1.0)
      optimizer.build([variable])

    def replica_fn():
      optimizer.apply([tf.constant(1.0)], [variable], scale=0.125)

    tf.function(lambda: strategy.run(replica_fn))()
    self.assertEqual(variable.numpy(), 1 - len(DEVICES) * 0.125)


class CrossReplicaTest(tf.test.TestCase):
  def test_an_update_outside_of_replicas_is_refused(self):
    with _strategy().scope():
      variable, optimizer = tf.Variable(1.0), keras.optimizers.SGD()
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'strategy.run'
      ):
        optimizer.apply([tf.constant(1.0)], [variable])


class CapturedGradientTest(tf.test.TestCase, parameterized.TestCase):
  """All replicas apply the same tensor, which was created outside the step."""

  @parameterized.product(
    make=[*OURS, tf.distribute.MirroredStrategy],
    case=[
      ({}, 1, tf.function),
      ({}, 1, lambda f: f),
      ({'clipvalue': 100.0}, 4, tf.function),
    ],
  )
  def test_as_under_mirrored_strategy(self, make, case):
    """Counts the gradient once, or once per replica if Keras changes it first."""
    options, count, wrap = case
    strategy = make(list(DEVICES))
    with strategy.scope():
      variable = keras.Variable([1.0, 2.0])
      optimizer = keras.optimizers.SGD(1.0, **options)
      optimizer.build([variable])
    gradient = tf.constant([1.0, 3.0])

    @wrap
    def step():
      strategy.run(lambda: optimizer.apply([gradient], [variable]))

    step()
    self.assertAllEqual(variable.numpy(), [1.0 - count, 2.0 - 3 * count])

  @parameterized.parameters(*OURS)
  def test_an_accumulator_holds_the_gradient_of_the_whole_batch(self, make):
    """Checks that the accumulator equals one device's, as checkpoints require."""
    strategy = make(list(DEVICES))
    with strategy.scope():
      variable = keras.Variable([1.0, 2.0])
      optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
      optimizer.build([variable])
    gradient = tf.constant([1.0, 3.0])  # Each of the 4 replicas adds it once.
    for accumulated, value in (([4, 12], [1, 2]), ([0, 0], [1 - 4, 2 - 12])):
      strategy.run(lambda: optimizer.apply([gradient], [variable]))
      (accumulator,) = optimizer._accumulated_gradients
      self.assertAllEqual(accumulator.numpy(), accumulated)
      self.assertAllEqual(variable.numpy(), value)


class DevicesTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('missing', [virtual_devices.name(0), 'CPU:77'], "'CPU:77'"),
    (
      'twice',
      [virtual_devices.name(0), f'/device:{virtual_devices.name(0)}'],
      'each device once',
    ),
    ('empty', [], 'at least one device'),
  )
  def test_wrong_device_list(self, devices, message):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, f'{message}.*list_logical_devices'
    ):
      tfs.RingMirroredStrategy(devices)


class NumbersTest(tf.test.TestCase, parameterized.TestCase):
  """Python can use variables as numbers, as on one device."""

  @parameterized.parameters('ring_mirrored', 'central_storage')
  def test_of_variables(self, name):
    on_read = tf.VariableSynchronization.ON_READ
    with tfs.create_strategy(
      name, devices=[virtual_devices.name(0), virtual_devices.name(1)]
    ).scope():
      optimizer = keras.optimizers.SGD(0.25)
      metric = keras.metrics.Mean()
      variable = tf.Variable(2.5)
      total = tf.Variable(
        1.5, synchronization=on_read, aggregation=tf.VariableAggregation.SUM
      )
    metric.update_state([3.0, 4.0])
    variable.assign_sub(2.5)
    self.assertEqual(int(optimizer.iterations), 0)
    self.assertEqual(float(optimizer.learning_rate), 0.25)
    self.assertEqual(float(metric.total), 7.0)
    self.assertEqual(complex(variable), 0j)
    self.assertEqual(float(total), 3.0)


class SavedModelTest(tf.test.TestCase):
  def test_function_that_reads_a_mean_of_replicas(self):
    strategy = tfs.RingMirroredStrategy(virtual_devices.names(2))
    with strategy.scope():
      module = tf.Module()
      module.mean = tf.Variable(
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
      )

    def write():
      context = tf.distribute.get_replica_context()
      number = tf.cast(context.replica_id_in_sync_group, tf.float32)
      module.mean.assign(1 + 2 * number)

    strategy.run(write)
    # Traced for all replicas before it is saved.
    read = tf.function(lambda: {'mean': module.mean.read_value()})
    signature = read.get_concrete_function()
    self.assertEqual(float(signature()['mean']), 2)
    directory = self.create_tempdir().full_path
    tf.saved_model.save(module, directory, signatures=signature)
    loaded = tf.saved_model.load(directory)
    # A checkpoint stores the mean for every replica.
    self.assertEqual(float(loaded.signatures['serving_default']()['mean']), 2)


class RegistryTest(tf.test.TestCase, parameterized.TestCase):
  def test_names_make_strategies(self):
    for name, kind, replicas in (
      ('one_device', tf.distribute.OneDeviceStrategy, 1),
      ('mirrored', tf.distribute.MirroredStrategy, 4),
      ('ring_mirrored', tfs.RingMirroredStrategy, 4),
      ('central_storage', tfs.CentralStorageStrategy, 4),
      ('multi_worker_ring', tfs.MultiWorkerRingStrategy, 4),
    ):
      strategy = tfs.create_strategy(name, devices=list(DEVICES))
      self.assertIsInstance(strategy, kind)
      self.assertEqual(strategy.num_replicas_in_sync, replicas)

  @parameterized.parameters(
    'ring_mirrored', 'central_storage', 'multi_worker_ring', 'mirrored'
  )
  def test_devices_as_tensorflow_lists_them(self, name):
    devices = tf.config.list_logical_devices(virtual_devices.KIND)[1:3]
    strategy = tfs.create_strategy(name, devices=devices)
    self.assertEqual(
      strategy.extended.worker_devices,
      tuple(f'/job:localhost/replica:0/task:0{d.name}' for d in devices),
    )
    if name == 'central_storage':
      strategy = tfs.create_strategy(name, parameter_device=devices[1])
      self.assertEndsWith(strategy.parameter_device, devices[1].name)

  @parameterized.parameters(
    ('tpu_ring', 'without cores|names no TPU'),
    ('ring_mirored', 'ring_mirored'),
  )
  def test_other_names_are_refused(self, name, message):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      tfs.create_strategy(name)


if __name__ == '__main__':
  tf.test.main()
