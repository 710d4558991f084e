"""With one replica, a step has the same operations as without a strategy."""

import collections
import functools
import itertools
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.distribute import mirrored_strategy

import tf_strategies as tfs
from tests import tf_case, tiers, virtual_devices

virtual_devices.configure()

_DEVICE = [virtual_devices.name(0)]
_X = np.arange(48).reshape(12, 4) % 7
_Y = np.float32(_X[:, :1] / 7)
_STRATEGIES = {
  'one_device': lambda: tfs.create_strategy('one_device', devices=_DEVICE),
  'ring_mirrored': lambda: tfs.RingMirroredStrategy(_DEVICE),
  'sharded_state': lambda: tfs.RingMirroredStrategy(
    _DEVICE, shard_optimizer_state=True
  ),
  'central_storage': lambda: tfs.CentralStorageStrategy(_DEVICE, *_DEVICE),
  'multi_worker_ring': lambda: tfs.MultiWorkerRingStrategy(devices=_DEVICE),
  'multi_worker_collective': lambda: tfs.MultiWorkerCollectiveStrategy(
    devices=_DEVICE
  ),
}


def _adam():
  return keras.optimizers.Adam(
    use_ema=True,
    ema_overwrite_frequency=2,
    weight_decay=0.1,
    global_clipnorm=1.0,
    gradient_accumulation_steps=2,
  )


def _loss_scale():
  inner = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0)
  return keras.optimizers.LossScaleOptimizer(inner)


def _built(strategy, make_optimizer):
  """Returns a built model and a built optimizer."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(1)
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.Input([4], dtype='int32'),
        keras.layers.Embedding(7, 3),
        keras.layers.Flatten(),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=1),
        keras.layers.Dense(1),
      ]
    )
    optimizer = make_optimizer()
    optimizer.build(model.trainable_variables)
  return model, optimizer


def _steps_of_model(strategy, make_optimizer, compiles):
  """Returns the graphs that `fit`, `evaluate` and `predict` run."""
  model, optimizer = _built(strategy, make_optimizer)
  with strategy.scope():
    model.compile(optimizer, 'mse', metrics=['mae'], jit_compile=compiles)
  model.fit(_X, _Y, batch_size=4, verbose=0)  # Creates the metrics.
  model.make_train_function(force=True)
  model.fit(_X, _Y, batch_size=4, verbose=0)
  model.evaluate(_X, _Y, batch_size=4, verbose=0)
  model.predict(_X, batch_size=4, verbose=0)
  functions = model.train_function, model.test_function, model.predict_function
  return list(itertools.chain(*map(_graphs, functions)))


def _step_of_loop(strategy, make_optimizer, compiles):
  """Returns the graph of a custom step that uses many `tf.distribute` methods."""
  model, optimizer = _built(strategy, make_optimizer)
  with strategy.scope():
    metric = keras.metrics.MeanSquaredError()
    metric.update_state(_Y, _Y)

  def replica(x, y):
    with tf.GradientTape() as tape:
      predicted = model(x, training=True)
      loss = tf.nn.compute_average_loss(
        tf.reduce_sum((predicted - y) ** 2, 1), global_batch_size=4
      )
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    metric.update_state(y, predicted)
    context = tf.distribute.get_replica_context()
    total = context.all_reduce('SUM', loss)
    return total, predicted, context.all_gather(predicted, 0)

  @tf.function(jit_compile=compiles)
  def step(x, y):
    total, predicted, gathered = strategy.run(replica, (x, y))
    return (
      strategy.reduce('MEAN', total, axis=None),
      strategy.reduce('SUM', predicted, axis=0),
      strategy.gather(gathered, axis=0),
      strategy.experimental_local_results(predicted)[0],
    )

  batches = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(4)
  for x, y in strategy.experimental_distribute_dataset(batches):
    step(x, y)
  return _graphs(step)


@functools.cache
def _of_one_device(trace, optimizer, compiles):
  return trace(tf.distribute.get_strategy(), optimizer, compiles)


def _graphs(function) -> list:
  """Returns the operations of a `tf.function`, or of those that a function calls."""
  if hasattr(function, '_list_all_concrete_functions'):
    return [
      _operations(concrete.graph)
      for concrete in function._list_all_concrete_functions()
    ]
  cells = [
    c.cell_contents for c in getattr(function, '__closure__', None) or ()
  ]
  if hasattr(function, '__wrapped__'):
    cells.append(function.__wrapped__)
  called = dict.fromkeys(c for c in cells if callable(c))
  return list(itertools.chain(*map(_graphs, called)))


def _operations(graph) -> collections.Counter:
  """Returns the number of operations of each type, including called functions.

  Arguments are not counted, because a distributed dataset has a different type
  of iterator.
  """
  count = collections.Counter()
  for op in graph.get_operations():
    if op.type == 'Placeholder':
      continue
    count[op.type] += 1
    names = [a.func.name for a in op.node_def.attr.values() if a.func.name]
    for function in map(graph._get_function, names):
      if hasattr(function, 'graph'):
        count += _operations(function.graph)
  return count


class OneReplicaTest(tf_case.TestCase):
  """Graphs are compared with those of TensorFlow's default strategy."""

  def setUp(self):
    super().setUp()
    # Between GPUs, TensorFlow's replicas use NCCL in functions that XLA compiles.
    self.enter_context(
      mock.patch.object(mirrored_strategy, '_is_gpu_device', lambda _: True)
    )

  @tiers.product(
    name=list(_STRATEGIES),
    case=((_adam, False), tiers.soak(_loss_scale, True)),
  )
  def test_steps_have_no_extra_operations(self, name, case):
    self.assert_no_extra_operations(name, *case)

  @parameterized.parameters('ring_mirrored', 'multi_worker_collective')
  def test_compiled_steps_have_no_extra_operations(self, name):
    """Checks that the steps also run: XLA does not compile our collectives."""
    self.assert_no_extra_operations(name, _loss_scale, True)

  def assert_no_extra_operations(self, name, optimizer, compiles):
    """Checks the graphs of all kinds of steps."""
    for trace in (_steps_of_model, _step_of_loop):
      expected = _of_one_device(trace, optimizer, compiles)
      found = trace(_STRATEGIES[name](), optimizer, compiles)
      self.assertGreater(sum(c.total() for c in expected), 50)
      for ours, theirs in zip(found, expected, strict=True):
        self.assertEmpty(ours - theirs)
        # Part of the all-reduce in Keras, which an optimizer of a strategy skips.
        less = (theirs - ours).keys()
        self.assertLessEqual(less, {'Identity', 'IdentityN'})

  @parameterized.product(
    name=('one_device', 'parameter_server'), is_built=(True, False)
  )
  def test_fit_reads_no_batch_to_create_variables(self, name, is_built):
    """Checks that no batch is lost and a seeded shuffle keeps its first order."""

    def losses(strategy):
      keras.utils.set_random_seed(1)
      with strategy.scope():
        layers = [keras.Input([4])] if is_built else []
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile('sgd', 'mse', metrics=['mae'])
      data = tf.data.Dataset.from_tensor_slices((_X, _Y)).shuffle(12, seed=1)
      return model.fit(data.batch(4), epochs=2, verbose=0).history['loss']

    expected = losses(tf.distribute.get_strategy())
    self.assertAllEqual(losses(tfs.create_strategy(name)), expected)


if __name__ == '__main__':
  tf.test.main()
