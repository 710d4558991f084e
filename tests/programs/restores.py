"""`tf.train.Checkpoint.restore` before variables exist.

TensorFlow keeps the saved values until a step creates their variables. A run
that stops and resumes this way must equal a run that never stopped. Each
replica draws its own noise, which one device cannot reproduce, so the programs
compare the two runs themselves.
"""

import functools
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.programs import common

_ROWS = 12
_STOP, _STEPS = 3, 6
_ON_READ = tf.VariableSynchronization.ON_READ


class Lazy(keras.layers.Layer):
  """A layer with each kind of state, created in its first call."""

  def build(self, shape):
    """Creates a weight, a sum over replicas, a counter and a random generator."""
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
  """A model that Keras builds by calling it with symbolic tensors."""

  def __init__(self, layers):
    super().__init__()
    # Keras does not save layers in a list.
    self.first, self.norm, self.last = layers

  def call(self, inputs, training=False):
    """Calls each layer."""
    return self.last(self.norm(self.first(inputs), training=training))


class Counter(tf.Module):
  """An integer sum over replicas, created in its first call."""

  def __init__(self):
    super().__init__()
    self.total = None

  def __call__(self):
    if self.total is None:
      self.total = tf.Variable(
        lambda: tf.zeros([], tf.int64),
        trainable=False,
        synchronization=_ON_READ,
        aggregation=tf.VariableAggregation.SUM,
      )
    context = tf.distribute.get_replica_context()
    # The total is odd, so replicas cannot divide it evenly.
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    self.total.assign_add(tf.cast(is_first, tf.int64))


_OPTIMIZERS = {
  'momentum': lambda: keras.optimizers.SGD(0.01, momentum=0.9),
  'ema': lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5),
  'accumulation': lambda: keras.optimizers.Adam(
    0.1, gradient_accumulation_steps=2
  ),
  'loss_scale': lambda: keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2
  ),
}


def _numbers():
  x = np.random.default_rng(0).normal(size=[_ROWS, 5]).astype(np.float32)
  return x, x[:, :1] * 2 + 1


def _run(name, how, steps, path=None):
  """Trains some steps, starting from a checkpoint if `path` is given.

  Returns:
    The checkpoint object, the losses, and each variable's value.
  """
  keras.utils.set_random_seed(1)
  make = Subclass if how.endswith('subclass') else keras.Sequential
  net = make([Lazy(), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
  optimizer = _OPTIMIZERS[name]()
  mean, counter = keras.metrics.Mean(), Counter()
  checkpoint = tf.train.Checkpoint(
    optimizer=optimizer, net=net, mean=mean.variables, counter=counter
  )
  status = checkpoint.restore(path) if path else None
  if how.startswith('fit'):
    net.compile(optimizer, 'mse', metrics=['mae'])
    x, y = _numbers()
    losses = common.fit(net, x, y, batch_size=_ROWS, epochs=steps)['loss']
  else:
    losses = _loop(net, optimizer, mean, counter, how, steps)
  if status is not None:
    status.assert_consumed()
  variables = [*net.variables, *optimizer.variables, *mean.variables]
  variables = [v.value for v in variables]
  if counter.total is not None:
    variables.append(counter.total)
  for value in variables:
    if value.synchronization != _ON_READ and not hasattr(value, 'shard'):
      first, *others = tf.distribute.get_strategy().experimental_local_results(
        value
      )
      for other in others:
        np.testing.assert_array_equal(first, other)
  return checkpoint, losses, [v.numpy() for v in variables]


def _loop(net, optimizer, mean, counter, how, steps):
  strategy = tf.distribute.get_strategy()

  def replica(x, y):
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum((net(x, training=True) - y) ** 2) / _ROWS
      scaled = optimizer.scale_loss(loss)
    weights = net.trainable_variables
    gradients = tape.gradient(scaled, weights)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))
    mean.update_state(loss)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
      counter()  # TensorFlow cannot create such a variable in a branch.
    return loss

  if how == 'inner_function':
    replica = tf.function(replica)

  def step(x, y):
    return strategy.reduce('SUM', strategy.run(replica, (x, y)), axis=None)

  if how.startswith('function'):
    step = tf.function(step)
  data = tf.data.Dataset.from_tensor_slices(_numbers()).batch(_ROWS)
  data = strategy.experimental_distribute_dataset(data.repeat(steps))
  return [float(step(*batch)) for batch in data]


def _restored(name, how):
  """Checks that a resumed run equals an uninterrupted one."""
  directory = tempfile.mkdtemp()
  checkpoint, *_ = _run(name, how, _STOP)
  path = checkpoint.save(os.path.join(directory, 'c'))
  _, losses, values = _run(name, how, _STEPS - _STOP, path)
  _, whole, expected = _run(name, how, _STEPS)
  found, expected = [losses, *values], [whole[_STOP:], *expected]
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def _managed():
  """Saves with a `CheckpointManager` after each step, as docs/checkpoints.md shows."""
  strategy = tf.distribute.get_strategy()
  count = strategy.num_replicas_in_sync
  is_chief = strategy.extended.should_checkpoint
  shared = common.shared_directory()
  own = shared if is_chief else tempfile.mkdtemp()
  for steps, total in (2, 2), (3, 5):
    weight = tf.Variable(tf.zeros([2]), aggregation=tf.VariableAggregation.MEAN)
    mean = keras.metrics.Mean()
    checkpoint = tf.train.Checkpoint(weight=weight, mean=mean.variables)
    checkpoint.restore(tf.train.latest_checkpoint(shared))
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
    sums = total * np.array([count * (count + 1) / 2, count])
    np.testing.assert_array_equal(weight.numpy(), sums)
    assert float(mean.result()) == (count + 1) / 2
    # All workers wait here until the chief has written its files.
    strategy.run(
      lambda: tf.distribute.get_replica_context().all_reduce(
        'SUM', tf.constant(1.0)
      )
    )
  files = os.listdir(shared)
  assert 'ckpt-5.index' in files and 'ckpt-3.index' not in files, files


PROGRAMS = {
  'managed': _managed,
  **{
    f'restored_{name}_{how}': functools.partial(_restored, name, how)
    for name, how in (
      ('ema', 'function'),
      ('momentum', 'eager'),
      ('ema', 'inner_function'),
      ('accumulation', 'fit'),
      ('loss_scale', 'fit'),
      ('loss_scale', 'fit_subclass'),
      ('loss_scale', 'function'),
      ('momentum', 'fit'),
      # Without 'ema': at its end `fit` replaces weights by moving averages.
      ('momentum', 'fit_subclass'),
      ('ema', 'function_subclass'),
    )
  },
}
