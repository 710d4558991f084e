"""RingMirroredStrategy reduces only with its own op, and rejects invalid devices."""

import keras
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices

virtual_devices.configure()

SUM = tf.distribute.ReduceOp.SUM
DEVICES = virtual_devices.names(4)
OURS = [
  tfs.RingMirroredStrategy,
  tfs.CentralStorageStrategy,
  lambda devices: tfs.MultiWorkerRingStrategy(devices=devices),
]


def _strategy(cross_device_ops=None):
  return tfs.RingMirroredStrategy(DEVICES, cross_device_ops)


class RoutingTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_every_reduction_uses_the_op_of_the_strategy(self):
    ops = tfs.RingAllReduce()
    strategy = _strategy(ops)
    with strategy.scope():
      total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
      first = tf.Variable(
        0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
      )

    def replica_fn():
      context = tf.distribute.get_replica_context()
      i = context.replica_id_in_sync_group
      total.assign_add(tf.cast(i + 1, tf.float32))
      first.assign(i + 5)
      sums = context.all_reduce(SUM, [i, i + tf.range(2)])
      return i, tf.fill([1 + tf.cast(i > 1, tf.int32), 2], i), sums

    step = tf.function(lambda: strategy.run(replica_fn))
    for _ in range(3):
      numbers, rows, sums = step()
    for replica in range(4):
      self.assertAllEqual(sums[0].values[replica], 6)
      self.assertAllEqual(sums[1].values[replica], [6, 10])
      self.assertAllEqual(total.values[replica], 30.0)
      self.assertAllEqual(first.values[replica], 5)
    gathered = strategy.gather(rows, axis=0)
    self.assertAllEqual(gathered[:, 0], [0, 1, 2, 2, 3, 3])
    self.assertAllEqual(strategy.reduce(SUM, numbers, axis=None), 6)
    # Executions, not traces.
    self.assertEqual(
      ops.report()['calls'],
      {'all_reduce': 6, 'broadcast': 3, 'gather': 1, 'reduce': 1},
    )


class Scaled(keras.optimizers.SGD):
  def apply(self, grads, trainable_variables=None, scale=1.0):
    super().apply([g * scale for g in grads], trainable_variables)


class OptimizerTest(tf.test.TestCase):
  def test_apply_accepts_further_arguments(self):
    strategy = _strategy()
    with strategy.scope():
      variable, optimizer = tf.Variable(1.0), Scaled(1.0)
      optimizer.build([variable])

    def replica_fn():
      optimizer.apply([tf.constant(1.0)], [variable], scale=0.125)

    tf.function(lambda: strategy.run(replica_fn))()
    self.assertEqual(variable.numpy(), 1 - len(DEVICES) * 0.125)

  def test_update_outside_of_replicas_is_refused(self):
    with _strategy().scope():
      variable, optimizer = tf.Variable(1.0), keras.optimizers.SGD()
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'strategy.run'
      ):
        optimizer.apply([tf.constant(1.0)], [variable])


def _count():
  return tf.distribute.get_strategy().num_replicas_in_sync


_UNDIVIDED = {
  'reduce_mean': lambda y, p: tf.reduce_mean((p - y) ** 2),
  'ops_mean': lambda y, p: keras.ops.mean(keras.ops.square(p - y)),
  'mean_of_row_losses': lambda y, p: tf.reduce_mean(
    keras.losses.mean_squared_error(y, p)
  ),
  'with_further_terms': lambda y, p: (
    tf.reduce_mean(tf.abs(p - y)) - tf.reduce_sum(p) / 8 + 1.0
  ),
}
_DIVIDED = {
  'compute_average_loss': lambda y, p: tf.nn.compute_average_loss(
    keras.losses.mean_squared_error(y, p), global_batch_size=8
  ),
  'sum': lambda y, p: tf.reduce_sum((p - y) ** 2) / 8,
  'mean': lambda y, p: tf.reduce_mean((p - y) ** 2) / _count(),
  'mean_times_share': lambda y, p: (
    tf.reduce_mean((p - y) ** 2) * tf.cast(tf.shape(y)[0], tf.float32) / 8
  ),
  'keras_loss': lambda y, p: keras.losses.MeanSquaredError()(y, p),
  'mean_of_features': lambda y, p: (
    tf.reduce_sum(tf.reduce_mean((p - y) ** 2, -1)) / 8
  ),
}


class UndividedLossTest(tf_case.TestCase):
  """A loop warns if its loss is not divided by the number of replicas."""

  def warnings(self, strategy, loss, change=lambda g: g, rows=16):
    """Returns the warnings of a loop, run twice in a `tf.function`."""
    with strategy.scope():
      kernel = keras.Variable(tf.ones([3, 2]))
      optimizer = keras.optimizers.SGD(0.01)
      optimizer.build([kernel])

    def step(batch):
      def replica_fn(x):
        with tf.GradientTape() as tape:
          value = loss(x[:, :2], x @ kernel)
        [gradient] = tape.gradient(value, [kernel.value])
        optimizer.apply([change(gradient)], [kernel])

      strategy.run(replica_fn, args=(batch,))

    x = tf.reshape(tf.range(3.0 * rows), [rows, 3]) / (3 * rows)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
    run = tf.function(step)
    with self.assertLogs('absl', 'INFO') as logs:
      logging.info('The run starts.')  # assertLogs needs at least one line.
      for batch in strategy.experimental_distribute_dataset(dataset):
        run(batch)
    return [line for line in logs.output if 'mean' in line]

  @parameterized.parameters(
    *[(name, OURS[0]) for name in _UNDIVIDED],
    *[('reduce_mean', make) for make in OURS[1:]],
  )
  def test_undivided_loss_warns(self, name, make):
    lines = self.warnings(make(list(DEVICES)), _UNDIVIDED[name])
    self.assertLen(lines, 1)
    self.assertIn('4 times too large', lines[0])
    self.assertIn('strategy.num_replicas_in_sync', lines[0])

  @parameterized.parameters(*_DIVIDED)
  def test_divided_loss_does_not_warn(self, name):
    for rows in (16, 9):
      self.assertEmpty(self.warnings(_strategy(), _DIVIDED[name], rows=rows))

  def test_divided_gradient_does_not_warn(self):
    mean = _UNDIVIDED['reduce_mean']
    found = self.warnings(_strategy(), mean, change=lambda g: g / _count())
    self.assertEmpty(found)

  def test_one_replica_does_not_warn(self):
    strategy = tfs.RingMirroredStrategy(list(DEVICES[:1]))
    self.assertEmpty(self.warnings(strategy, _UNDIVIDED['reduce_mean']))


class CapturedGradientTest(tf_case.TestCase):
  """All replicas apply the same tensor, which was created outside the step."""

  @parameterized.product(
    make=[*OURS, tf.distribute.MirroredStrategy],
    case=[
      ({}, 1, tf.function),
      ({}, 1, lambda f: f),
      ({'clipvalue': 100.0}, 4, tf.function),
    ],
  )
  def test_captured_gradient_counts_as_under_mirrored_strategy(
    self, make, case
  ):
    """Counts the gradient once, or once per replica if Keras changes it first."""
    options, count, wrap = case
    strategy = make(DEVICES)
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
  def test_accumulator_holds_the_gradient_of_the_whole_batch(self, make):
    """Checks that the accumulator equals one device's, as checkpoints require."""
    strategy = make(DEVICES)
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


class DevicesTest(tf_case.TestCase):
  @parameterized.named_parameters(
    ('missing', [virtual_devices.name(0), 'CPU:77'], "'CPU:77'"),
    (
      'twice',
      [virtual_devices.name(0), f'/device:{virtual_devices.name(0)}'],
      'each device once',
    ),
    ('empty', [], 'at least one device'),
  )
  def test_invalid_device_list_is_refused(self, devices, message):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, f'{message}.*list_logical_devices'
    ):
      tfs.RingMirroredStrategy(devices)


class NumbersTest(tf_case.TestCase):
  """Python can use variables as numbers, as on one device."""

  @parameterized.parameters(*OURS[:2])
  def test_variables_convert_to_numbers(self, make):
    on_read = tf.VariableSynchronization.ON_READ
    with make(DEVICES[:2]).scope():
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

  @parameterized.parameters(*OURS[:2])
  def test_reduced_variable_counts_once_per_replica(self, make):
    strategy = make(DEVICES[:3])
    with strategy.scope():
      variable = tf.Variable([1.0, 2.0])
    for op, expected in ('SUM', [3.0, 6.0]), ('MEAN', [1.0, 2.0]):
      self.assertAllClose(strategy.reduce(op, variable, None), expected)


class SavedModelTest(tf.test.TestCase):
  def test_saved_function_reads_the_mean_of_replicas(self):
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


class RegistryTest(tf_case.TestCase):
  @parameterized.parameters(
    ('ring_mirrored', tfs.RingMirroredStrategy),
    ('central_storage', tfs.CentralStorageStrategy),
    ('multi_worker_ring', tfs.MultiWorkerRingStrategy),
    ('mirrored', tf.distribute.MirroredStrategy),
  )
  def test_logical_devices_are_accepted(self, name, kind):
    devices = tf.config.list_logical_devices(virtual_devices.KIND)[1:3]
    strategy = tfs.create_strategy(name, devices=devices)
    self.assertIsInstance(strategy, kind)
    self.assertEqual(
      strategy.extended.worker_devices,
      tuple(f'/job:localhost/replica:0/task:0{d.name}' for d in devices),
    )
    if name == 'central_storage':
      strategy = tfs.create_strategy(name, parameter_device=devices[1])
      self.assertEndsWith(strategy.parameter_device, devices[1].name)


if __name__ == '__main__':
  tf.test.main()
