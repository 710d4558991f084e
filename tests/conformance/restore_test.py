"""`tf.train.Checkpoint.restore` before variables exist, on every strategy.

TensorFlow keeps the values of variables that are made later, and hands each to its
variable when a step makes it. A run that was stopped and goes on so must equal the
run that was never stopped, and all copies of a variable must be equal.
"""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers, processes, tiers, virtual_devices

virtual_devices.configure()

_ROWS = 12
_DEADLINE_SECONDS = 280
_STOP, _STEPS = 3, 6


class Lazy(keras.layers.Layer):
  """A layer with each kind of state, all made when it is called first."""

  def build(self, shape):
    """Makes a weight, a sum over replicas, a counter and random numbers."""
    self.kernel = self.add_weight(shape=(shape[-1], 3), name='kernel')
    self.seen = keras.Variable(
      'zeros',
      shape=(),
      dtype='float32',
      trainable=False,
      aggregation='sum',
      synchronization='on_read',
      name='seen',
    )
    self.calls = self.add_weight(
      shape=(),
      name='calls',
      trainable=False,
      initializer='zeros',
      dtype='int32',
      aggregation='only_first_replica',
    )
    self.generator = keras.random.SeedGenerator(7)
    self.generator_state = self.generator.state

  def call(self, inputs):
    """Writes all of the layer's state."""
    self.seen.assign_add(tf.reduce_mean(inputs))
    self.calls.assign_add(1)
    noise = keras.random.uniform([3], seed=self.generator)
    return inputs @ self.kernel * (1 + noise / 10)


class Subclass(keras.Model):
  """A model that Keras builds by calling it with tensors without values."""

  def __init__(self, layers):
    super().__init__()
    self.first, self.norm, self.last = layers  # A list of layers is not saved.

  def call(self, inputs, training=False):
    """Calls each layer."""
    return self.last(self.norm(self.first(inputs), training=training))


class Counter(tf.Module):
  """An integer sum over replicas, which is made when it is called first."""

  def __init__(self):
    super().__init__()
    self.total = None

  def __call__(self):
    if self.total is None:
      self.total = tf.Variable(
        lambda: tf.zeros([], tf.int64),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )
    context = tf.distribute.get_replica_context()
    # An odd number in all, which replicas cannot share.
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    self.total.assign_add(tf.cast(is_first, tf.int64))


OPTIMIZERS = {
  'momentum': lambda: keras.optimizers.SGD(0.01, momentum=0.9),
  'ema': lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5),
  'accumulation': lambda: keras.optimizers.Adam(
    0.1, gradient_accumulation_steps=2
  ),
  'loss_scale': lambda: keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2
  ),
}


def numbers():
  """Returns a batch of inputs and of targets."""
  x = np.random.default_rng(0).normal(size=[_ROWS, 5]).astype(np.float32)
  return x, x[:, :1] * 2 + 1


def run(strategy, name, how, steps, path=None):
  """Trains some steps, from a checkpoint if there is one.

  Returns:
    The checkpoint object, the losses, each variable's value, and the copies of
    those variables that are equal everywhere.
  """
  keras.backend.clear_session()
  keras.utils.set_random_seed(1)
  with strategy.scope():
    make = Subclass if how.endswith('subclass') else keras.Sequential
    net = make(
      [Lazy(), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    optimizer = OPTIMIZERS[name]()
    mean, counter = keras.metrics.Mean(), Counter()
  checkpoint = tf.train.Checkpoint(
    optimizer=optimizer, net=net, mean=mean.variables, counter=counter
  )
  status = checkpoint.restore(path) if path else None
  x, y = numbers()
  if how.startswith('fit'):
    with strategy.scope():
      net.compile(optimizer, 'mse', metrics=['mae'])
    history = net.fit(
      x, y, batch_size=_ROWS, epochs=steps, shuffle=False, verbose=0
    )
    losses = history.history['loss']
  else:
    losses = _loop(strategy, net, optimizer, mean, counter, how, steps)
  if status is not None:
    status.assert_consumed()
  variables = {
    v.path: v.value for v in [*net.variables, *optimizer.variables]
  } | {v.path: v.value for v in mean.variables}
  if counter.total is not None:
    variables['counter'] = counter.total
  on_read = tf.VariableSynchronization.ON_READ
  copies = {
    k: [c.numpy() for c in strategy.experimental_local_results(v)]
    for k, v in variables.items()
    if v.synchronization != on_read and not hasattr(v, 'shard')
  }
  values = {k: v.numpy() for k, v in variables.items()}
  return checkpoint, losses, values, copies


def _loop(strategy, net, optimizer, mean, counter, how, steps):
  def replica(x, y):
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum((net(x, training=True) - y) ** 2) / _ROWS
      scaled = optimizer.scale_loss(loss)
    weights = net.trainable_variables
    gradients = tape.gradient(scaled, weights)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))
    mean.update_state(loss)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
      counter()  # TensorFlow makes no such variable beside a branch.
    return loss

  if how == 'inner_function':
    replica = tf.function(replica)

  def step(x, y):
    return strategy.reduce('SUM', strategy.run(replica, (x, y)), axis=None)

  if how.startswith('function'):
    step = tf.function(step)
  data = tf.data.Dataset.from_tensor_slices(numbers()).batch(_ROWS)
  data = strategy.experimental_distribute_dataset(data.repeat(steps))
  return [float(step(*batch)) for batch in data]


def stopped_and_whole(make_strategy, name, how):
  """Returns the outcomes of a run that was stopped and of one that was not."""
  strategy = make_strategy()
  directory = tempfile.mkdtemp()
  try:
    checkpoint, *_ = run(strategy, name, how, _STOP)
    path = checkpoint.save(os.path.join(directory, 'c'))
    _, losses, values, copies = run(strategy, name, how, _STEPS - _STOP, path)
    _, whole, expected, _ = run(strategy, name, how, _STEPS)
  finally:
    getattr(strategy, 'close', lambda: None)()
  return (losses, list(values.values()), copies), (
    whole[_STOP:],
    list(expected.values()),
  )


def _in_workers(rank, strategy, devices, cases):
  del rank
  devices = virtual_devices.names(devices)
  return [
    stopped_and_whole(
      lambda: tfs.create_strategy(strategy, devices=devices), *case
    )
    for case in cases
  ]


def _on_servers(mode):
  return stopped_and_whole(
    lambda: tfs.create_strategy('parameter_server', mode=mode),
    'momentum',
    'fit_subclass',
  )


def _manage(rank, directory):
  """Saves with a manager after each step, as docs/checkpoints.md says."""
  strategy = tfs.create_strategy(
    'multi_worker_ring', devices=virtual_devices.names(1)
  )
  found = []
  try:
    for steps in (2, 3):
      with strategy.scope():
        weight = tf.Variable(tf.zeros([2]))
        mean = keras.metrics.Mean()
      checkpoint = tf.train.Checkpoint(weight=weight, mean=mean.variables)
      checkpoint.restore(tf.train.latest_checkpoint(directory))
      is_chief = strategy.extended.should_checkpoint
      own = directory if is_chief else tempfile.mkdtemp()
      manager = tf.train.CheckpointManager(checkpoint, own, max_to_keep=2)

      @tf.function
      def step(weight=weight, mean=mean):
        def replica():
          context = tf.distribute.get_replica_context()
          number = context.replica_id_in_sync_group + 1
          mean.update_state(number)
          weight.assign_add(
            context.all_reduce('SUM', tf.cast([number, 1], tf.float32))
          )

        strategy.run(replica)

      for _ in range(steps):
        step()
        manager.save()
      found.append((weight.numpy().tolist(), float(mean.result())))
      strategy.reduce('SUM', tf.constant(rank), axis=None)
    files = sorted(os.listdir(directory))
  finally:
    strategy.close()
  return found, files


class _RestoreTest(tf.test.TestCase, parameterized.TestCase):
  def assert_continues(self, found, whole):
    losses, values, copies = found
    self.assertAllClose(losses, whole[0], rtol=0, atol=1e-6)
    for value, expected in zip(values, whole[1], strict=True):
      self.assertAllClose(value, expected, rtol=0, atol=1e-6)
    for first, *others in copies.values():
      for other in others:
        self.assertAllEqual(first, other)


class RestoreTest(_RestoreTest):
  @tiers.named_parameters(
    ('ring', 'ring_mirrored', 'ema', 'function'),
    tiers.smoke('ring_eager', 'ring_mirrored', 'momentum', 'eager'),
    ('central', 'central_storage', 'ema', 'function'),
    ('central_eager', 'central_storage', 'momentum', 'eager'),
    ('ring_inner', 'ring_mirrored', 'ema', 'inner_function'),
    ('ring_fit', 'ring_mirrored', 'accumulation', 'fit'),
    ('ring_subclass', 'ring_mirrored', 'loss_scale', 'fit_subclass'),
    ('ring_momentum', 'ring_mirrored', 'momentum', 'fit'),
    ('central_fit', 'central_storage', 'loss_scale', 'fit'),
    # At its end `fit` replaces weights by their moving averages ('ema').
    ('central_momentum', 'central_storage', 'momentum', 'fit_subclass'),
    ('ring_loop', 'ring_mirrored', 'ema', 'function_subclass'),
    ('ring_loss_scale', 'ring_mirrored', 'loss_scale', 'function'),
    ('one', 'one_device', 'ema', 'function'),
  )
  def test_continues(self, strategy, name, how):
    def make():
      if strategy == 'one_device':
        return tf.distribute.get_strategy()
      return tfs.create_strategy(strategy, devices=virtual_devices.names(2))

    self.assert_continues(*stopped_and_whole(make, name, how))

  def test_continues_with_divided_state(self):
    def make():
      return tfs.create_strategy(
        'ring_mirrored',
        devices=virtual_devices.names(2),
        shard_optimizer_state=True,
      )

    self.assert_continues(*stopped_and_whole(make, 'accumulation', 'fit'))


class ProcessesTest(_RestoreTest):
  @tiers.named_parameters(
    tiers.smoke('ring', 'multi_worker_ring', 2, (('ema', 'function'),)),
    tiers.soak(
      'ring_of_one',
      'multi_worker_ring',
      1,
      (('momentum', 'eager'), ('loss_scale', 'fit_subclass')),
    ),
    tiers.soak(
      'collective',
      'multi_worker_collective',
      2,
      (('ema', 'function'), ('loss_scale', 'fit')),
    ),
  )
  def test_continues(self, strategy, devices, cases):
    by_worker = processes.run_workers(
      _in_workers,
      2,
      args=(strategy, devices, cases),
      deadline=_DEADLINE_SECONDS,
    )
    for (first, whole), (second, _) in zip(*by_worker, strict=True):
      self.assert_continues(first, whole)
      self.assertAllEqual(first[0], second[0])
      for name, copies in first[2].items():
        self.assertAllEqual(copies, second[2][name])

  @tiers.named_parameters(('sync', 'sync'), tiers.soak('async', 'async'))
  def test_continues_on_servers(self, mode):
    with parameter_servers.Job(
      num_workers=1, num_ps=2, deadline=_DEADLINE_SECONDS
    ) as job:
      self.assert_continues(*job.run(_on_servers, args=(mode,)))

  def test_manager_of_two_workers(self):
    directory = self.create_tempdir().full_path
    by_worker = processes.run_workers(
      _manage, 2, args=(directory,), deadline=_DEADLINE_SECONDS
    )
    for found, files in by_worker:
      self.assertEqual(found, [([6.0, 4.0], 1.5), ([15.0, 10.0], 1.5)])
      self.assertIn('ckpt-5.index', files)
      self.assertNotIn('ckpt-3.index', files)


if __name__ == '__main__':
  tf.test.main()
