"""RingMirroredStrategy reduces with its own op only, and rejects bad devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tiers, virtual_devices

virtual_devices.configure()

SUM = tf.distribute.ReduceOp.SUM
MEAN = tf.distribute.ReduceOp.MEAN
DEVICES = tuple(virtual_devices.names(4))
OURS = [
  tfs.RingMirroredStrategy,
  tfs.CentralStorageStrategy,
  lambda devices: tfs.MultiWorkerRingStrategy(devices=devices),
]


def _strategy(cross_device_ops=None):
  return tfs.RingMirroredStrategy(list(DEVICES), cross_device_ops)


def _per_replica(strategy, make):
  """Returns one value for each replica, made by `make(replica_id)` on its device."""

  def replica_fn():
    context = tf.distribute.get_replica_context()
    return make(context.replica_id_in_sync_group)

  return strategy.run(replica_fn)


class _CountingOps(tfs.RingAllReduce):
  """Counts its own calls and the calls to TensorFlow's op."""

  def __init__(self):
    super().__init__()
    self.reached = []

  def reduce(self, *args, **kwargs):
    self.reached.append('reduce')
    return super().reduce(*args, **kwargs)

  def batch_reduce(self, *args, **kwargs):
    self.reached.append('batch_reduce')
    return super().batch_reduce(*args, **kwargs)

  def broadcast(self, *args, **kwargs):
    self.reached.append('broadcast')
    return super().broadcast(*args, **kwargs)

  def _gather(self, *args, **kwargs):
    self.reached.append('gather')
    return super()._gather(*args, **kwargs)


class RoutingTest(tf.test.TestCase, parameterized.TestCase):
  """Every way to reduce uses the strategy's op, never TensorFlow's."""

  def setUp(self):
    super().setUp()
    self.ops = _CountingOps()
    self.strategy = _strategy(self.ops)

  @parameterized.parameters(tf.float32, tf.int32, tf.int64, tf.bfloat16)
  def test_reduce_to_the_host(self, dtype):
    values = _per_replica(
      self.strategy, lambda i: tf.cast(10 * i + tf.range(3), dtype)
    )
    total = self.strategy.reduce(SUM, values, axis=None)
    self.assertAllEqual(tf.cast(total, tf.int32), [60, 64, 68])
    self.assertEqual(total.dtype, dtype)
    mean = self.strategy.reduce(MEAN, values, axis=None)
    self.assertAllEqual(tf.cast(mean, tf.int32), [15, 16, 17])
    self.assertEqual(mean.dtype, dtype)
    self.assertEqual(self.ops.reached, ['batch_reduce'] * 2)
    self.assertEqual(self.ops.report()['calls']['reduce'], 2)

  @parameterized.parameters(tf.float32, tf.int32)
  def test_all_reduce_in_replica_context(self, dtype):
    @tf.function
    def step():
      def replica_fn():
        context = tf.distribute.get_replica_context()
        i = context.replica_id_in_sync_group
        return context.all_reduce(
          SUM, [tf.cast(i, dtype), tf.cast(i + tf.range(2), dtype)]
        )

      return self.strategy.run(replica_fn)

    for _ in range(3):
      results = step()
    for replica in range(4):
      scalar, vector = (r.values[replica] for r in results)
      self.assertAllEqual(scalar, 6)
      self.assertAllEqual(vector, [6, 10])
    # Counts executions, not traces. TensorFlow's op was not called.
    self.assertEqual(self.ops.calls, 3)
    self.assertEqual(self.ops.reached, ['batch_reduce'])

  @pytest.mark.smoke
  def test_gather_and_all_gather(self):
    values = _per_replica(
      self.strategy, lambda i: tf.fill([1 + tf.cast(i > 1, tf.int32), 2], i)
    )
    gathered = self.strategy.gather(values, axis=0)
    self.assertAllEqual(gathered[:, 0], [0, 1, 2, 2, 3, 3])

    @tf.function
    def step():
      def replica_fn():
        context = tf.distribute.get_replica_context()
        i = tf.cast(context.replica_id_in_sync_group, tf.int64)
        return context.all_gather(tf.stack([i, i + 10]), axis=0)

      return self.strategy.run(replica_fn)

    for copy in step().values:
      self.assertAllEqual(copy, [0, 10, 1, 11, 2, 12, 3, 13])
    self.assertIn('gather', self.ops.reached)
    self.assertEqual(self.ops.report()['calls']['gather'], 2)

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
    self.assertIn('batch_reduce', self.ops.reached)
    self.assertIn('broadcast', self.ops.reached)

  @pytest.mark.smoke
  def test_gradient_through_all_reduce(self):
    def replica_fn():
      context = tf.distribute.get_replica_context()
      x = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
      with tf.GradientTape() as tape:
        tape.watch(x)
        # (x0 + x1 + x2 + x3)^2 * x_i on replica i.
        y = context.all_reduce(SUM, x) ** 2 * x
      return tape.gradient(y, x)

    # d/dx_j sum_i S^2 x_i = 2 S * S + S^2 on every replica, with S = 10.
    gradients = self.strategy.run(tf.function(replica_fn))
    self.assertAllClose([g.numpy() for g in gradients.values], [300.0] * 4)


class AnyCrossDeviceOpsTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.parameters(tiers.smoke('ring'), 'tree', 'builtin')
  def test_trains_to_the_same_weights(self, name):
    op = tf.distribute.ReductionToOneDevice()
    if name != 'builtin':
      op = tfs.ScheduledAllReduce(name)
    weights = []
    for strategy in (_strategy(op), None):
      keras.utils.set_random_seed(1)
      with strategy.scope() if strategy else tf.name_scope(''):
        model = keras.Sequential(
          [keras.layers.Input([3]), keras.layers.Dense(2)]
        )
        model.compile('sgd', 'mse')
      x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
      model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
      weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
      self.assertAllClose(a, b, 0, 1e-6)


class ControlFlowTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_all_reduce_inside_cond(self):
    strategy = _strategy()

    @tf.function
    def step(flag):
      def replica_fn():
        context = tf.distribute.get_replica_context()
        i = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return tf.cond(
          flag,
          lambda: context.all_reduce(SUM, i + tf.range(2.0)),
          lambda: tf.zeros([2]),
        )

      return strategy.run(replica_fn)

    for copy in step(tf.constant(True)).values:
      self.assertAllEqual(copy, [6.0, 10.0])
    for copy in step(tf.constant(False)).values:
      self.assertAllEqual(copy, [0.0, 0.0])

  @pytest.mark.smoke
  def test_two_strategies_do_not_meet_in_each_others_collectives(self):
    # TensorFlow numbers the collectives of every strategy from the same start.
    # A second strategy with another shape would abort both.
    for size in (2, 5):
      strategy = _strategy()

      @tf.function
      def step(strategy=strategy, size=size):
        def replica_fn():
          context = tf.distribute.get_replica_context()
          return tf.cond(
            tf.constant(True),
            lambda: context.all_reduce(SUM, tf.ones([size])),
            lambda: tf.zeros([size]),
          )

        return strategy.run(replica_fn)

      self.assertAllEqual(step().values[3], [4.0] * size)


class CrossReplicaTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(1, 4)
  def test_an_update_outside_of_replicas_is_refused(self, count):
    with tfs.RingMirroredStrategy(list(DEVICES[:count])).scope():
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
  'losses_of_rows': lambda y, p: tf.reduce_mean(
    keras.losses.mean_squared_error(y, p)
  ),
  'a_term': lambda y, p: (
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


class UndividedLossTest(tf.test.TestCase, parameterized.TestCase):
  """A loop warns about gradients that are too large, and about nothing else."""

  def warnings(self, strategy, loss, change=lambda g: g, rows=16):
    """Returns the warnings of a loop, run twice eagerly and twice in a
    `tf.function`.
    """
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
    found = []
    for run in (step, tf.function(step)):
      strategy.extended._warned_undivided = False
      with self.assertLogs('absl', 'INFO') as logs:
        logging.info('The run starts.')  # assertLogs needs at least one line.
        for batch in strategy.experimental_distribute_dataset(dataset):
          run(batch)
      found.append([line for line in logs.output if 'mean' in line])
    return found

  @parameterized.product(
    name=list(_UNDIVIDED),
    make=[
      _strategy,
      lambda: tfs.CentralStorageStrategy(list(DEVICES)),
      lambda: tfs.MultiWorkerRingStrategy(devices=list(DEVICES)),
    ],
  )
  def test_undivided(self, name, make):
    for lines in self.warnings(make(), _UNDIVIDED[name]):
      self.assertLen(lines, 1)
      self.assertIn('4 times too large', lines[0])
      self.assertIn('strategy.num_replicas_in_sync', lines[0])

  @parameterized.parameters(*_DIVIDED)
  def test_divided(self, name):
    for rows in (16, 13, 9):
      found = self.warnings(_strategy(), _DIVIDED[name], rows=rows)
      self.assertEqual(found, [[], []])

  def test_what_divides_later(self):
    mean = _UNDIVIDED['reduce_mean']
    found = self.warnings(_strategy(), mean, change=lambda g: g / _count())
    self.assertEqual(found, [[], []])

  def test_one_replica_divides_by_one(self):
    strategy = tfs.RingMirroredStrategy(list(DEVICES[:1]))
    found = self.warnings(strategy, _UNDIVIDED['reduce_mean'])
    self.assertEqual(found, [[], []])


class CapturedGradientTest(tf.test.TestCase, parameterized.TestCase):
  """All replicas apply the same tensor, which was created outside the step."""

  @parameterized.product(
    make=[*OURS, tf.distribute.MirroredStrategy],
    wrap=[lambda f: f, tf.function],
    options_and_counts=[({}, 1), ({'clipvalue': 100.0}, 4)],
  )
  def test_as_under_mirrored_strategy(self, make, wrap, options_and_counts):
    """Counts the gradient once, or once per replica if Keras changes it first."""
    options, count = options_and_counts
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
    ('no_gpu', ['GPU:77'], "'GPU:77'"),
    (
      'twice',
      [virtual_devices.name(0), f'/device:{virtual_devices.name(0)}'],
      'twice',
    ),
    ('empty', [], 'at least one device'),
    ('string', virtual_devices.name(0), 'a list of device names'),
    ('number', [0], 'not 0'),
    ('nonsense', ['gizmo'], 'gizmo'),
    ('no_list', 4, 'a list of device names'),
  )
  def test_wrong_device_list(self, devices, message):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      tfs.RingMirroredStrategy(devices)
    with self.assertRaisesRegex(ValueError, 'list_logical_devices'):
      tfs.RingMirroredStrategy(devices)

  def test_wrong_cross_device_ops(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'cross_device_ops'
    ):
      tfs.RingMirroredStrategy([virtual_devices.name(0)], 'ring')

  def test_is_a_mirrored_strategy(self):
    self.assertIsInstance(_strategy(), tf.distribute.MirroredStrategy)


class OwnStep(keras.Sequential):
  """Only its `train_step` determines which variables training needs."""

  def train_step(self, data):
    """See base class."""
    x, y = data
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
    variables = self.trainable_variables
    self.optimizer.apply(tape.gradient(loss, variables), variables)
    return {'loss': loss}


class OwnStepTest(tf.test.TestCase):
  def test_an_optimizer_that_begins_with_a_constant(self):
    """Uses Nadam, which creates its momentum product in the step's graph."""
    x, y = np.arange(24.0).reshape([8, 3]) / 24, np.ones([8, 1])
    found = []
    for strategy in (
      tf.distribute.get_strategy(),
      tfs.RingMirroredStrategy(virtual_devices.names(2)),
    ):
      keras.utils.set_random_seed(1)
      with strategy.scope():
        model = OwnStep([keras.Input([3]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Nadam(0.1))
      model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
      found.append([v.numpy() for v in model.optimizer.variables])
      found[-1] += model.get_weights()
    for mine, theirs in zip(*found, strict=True):
      self.assertAllClose(mine, theirs, 1e-6, 1e-6)


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


class SavedModelTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    tfs.RingMirroredStrategy, tfs.CentralStorageStrategy
  )
  def test_function_that_reads_a_mean_of_replicas(self, make):
    strategy = make([virtual_devices.name(0), virtual_devices.name(1)])
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
