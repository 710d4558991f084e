"""Tests which parts of a step XLA compiles, and where they run."""

import contextlib
import inspect
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices
from tests.programs import common
from tests.programs.cases import STRATEGIES
from tf_strategies import _tf_internal
from tf_strategies.cross_device import links
from tf_strategies.strategies.mirrored import extended

virtual_devices.configure()

DEVICES = virtual_devices.names(4)
_STRATEGIES = (
  tfs.RingMirroredStrategy,
  tfs.CentralStorageStrategy,
  lambda d: tfs.MultiWorkerRingStrategy(devices=d),
  lambda d: tfs.MultiWorkerCollectiveStrategy(devices=d),
)
# Some operations that compute a step.
_COMPUTES = {
  'MatMul',
  'AssignAddVariableOp',
  'StatelessRandomUniformV2',
  'Cast',
}
# Operations that communicate between replicas, or call the host.
_COMMUNICATES = {
  'CollectiveReduceV2',
  'CollectiveReduceV3',
  'CollectiveGatherV2',
  'NcclAllReduce',
  'PyFunc',
  'EagerPyFunc',
}


def _data():
  rng = np.random.default_rng(3)
  return rng.normal(size=(32, 6)).astype('f4'), rng.integers(0, 3, 32)


def _train_function(model):
  """Returns the `tf.function` that Keras calls once a step."""
  function = inspect.unwrap(model.train_function)
  contents = [c.cell_contents for c in function.__closure__]
  [function] = [c for c in contents if hasattr(c, 'get_concrete_function')]
  return function


def _graph(strategy, jit_compile=True):
  """Returns the graph of a compiled model's step after running it."""
  x, y = _data()
  with strategy.scope():
    model = common.linear(6, 3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
      keras.optimizers.Adam(1e-2, clipnorm=0.1), loss, jit_compile=jit_compile
    )
  model.fit(x, y, 32, verbose=0)
  dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
  dataset = strategy.experimental_distribute_dataset(dataset)
  function = _train_function(model).get_concrete_function(iter(dataset))
  return function.graph.as_graph_def()


def _nodes(graph):
  """Returns all nodes, including the nodes in functions."""
  return [*graph.node, *(n for f in graph.library.function for n in f.node_def)]


def _blocks(graph):
  """Returns each compiled function's nodes, and the devices that call it."""
  functions = {
    f.signature.name: f.node_def
    for f in graph.library.function
    if f.attr['_XlaMustCompile'].b
  }
  callers = {name: set() for name in functions}
  for node in _nodes(graph):
    name = node.attr['f'].func.name
    if name in functions:
      callers[name].add(node.device.rpartition('/device:')[2])
  return [(functions[name], callers[name]) for name in functions]


@contextlib.contextmanager
def _with_a_gpu():
  """Makes TensorFlow report a GPU to Keras, which then resolves 'auto'."""
  gpu = tf.config.PhysicalDevice('/physical_device:GPU:0', 'GPU')
  with mock.patch.object(
    tf.config, 'list_physical_devices', lambda kind=None: [gpu]
  ):
    yield


class CompiledByDefaultTest(tf_case.TestCase):
  """Keras resolves 'auto' to False under any strategy, but ours follow one device."""

  def resolved(self, strategy, on_gpus, **options):
    patched = mock.patch.object(
      extended.ExactMirroredExtended, 'compiles_by_default', on_gpus
    )
    with patched, _with_a_gpu(), strategy.scope():
      model = common.linear(6, 3)
      model.compile('sgd', 'mse', **options)
      self.assertIs(model.distribute_strategy, strategy)
      return model.jit_compile

  @parameterized.parameters(*_STRATEGIES)
  def test_auto_compiles_on_gpus(self, make):
    for devices in (DEVICES, DEVICES[:1]):
      strategy = make(devices)
      is_gpu = virtual_devices.KIND == 'GPU'
      self.assertEqual(strategy.extended.compiles_by_default, is_gpu)
      self.assertTrue(self.resolved(strategy, True))
      self.assertFalse(self.resolved(strategy, False))
      for options in ({'jit_compile': False}, {'run_eagerly': True}):
        self.assertFalse(self.resolved(strategy, True, **options))

  def test_auto_compiles_the_train_step(self):
    strategy = tfs.RingMirroredStrategy(DEVICES)
    with (
      mock.patch.object(
        extended.ExactMirroredExtended, 'compiles_by_default', True
      ),
      _with_a_gpu(),
    ):
      self.assertNotEmpty(_blocks(_graph(strategy, 'auto')))
    if virtual_devices.KIND == 'CPU':
      self.assertEmpty(_blocks(_graph(strategy, 'auto')))


class CompiledModelTest(tf_case.TestCase):
  @parameterized.parameters(*STRATEGIES)
  def test_each_device_runs_compiled_blocks_between_exchanges(self, case):
    strategy = case.create()
    blocks = _blocks(_graph(strategy))
    forward = [
      (nodes, callers)
      for nodes, callers in blocks
      if 'MatMul' in {node.op for node in nodes}
    ]
    called_on = set().union(*(callers for _, callers in forward))
    self.assertCountEqual(called_on, DEVICES)
    for nodes, _ in blocks:
      self.assertNoCommonElements({node.op for node in nodes}, _COMMUNICATES)
    calls = strategy.communication_report()['calls']
    self.assertGreater(calls['all_reduce'] + calls['reduce'], 0)

  def test_list_of_compiled_operations(self):
    """Checks the list of compiled operations, which differs between CPU and GPU."""
    compiled = _tf_internal.compiled_operations(virtual_devices.name(0))
    self.assertContainsSubset(_COMPUTES, compiled)
    self.assertNotIn('PyFunc', compiled)


class CompiledLoopTest(tf_case.TestCase):
  """The step of a custom loop that XLA compiles, including its all-reduce."""

  def reduce(self):
    strategy = tfs.RingMirroredStrategy(DEVICES)

    @tf.function(jit_compile=True)
    def step(x):
      context = tf.distribute.get_replica_context()
      return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.square(x))

    dataset = tf.data.Dataset.from_tensors(tf.range(8.0)).unbatch().batch(8)
    [x] = strategy.experimental_distribute_dataset(dataset)
    return strategy.experimental_local_results(strategy.run(step, args=(x,)))

  def test_compiled_all_reduce_sums_or_is_refused(self):
    if links.nccl_is_usable(DEVICES):
      for result in self.reduce():
        self.assertAllClose(result, [0 + 4 + 16 + 36, 1 + 9 + 25 + 49])
      return
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'whole GPUs .*jit_compile=True'
    ):
      self.reduce()

  def train(self, strategy, kind):
    """Returns the weights after a step. XLA may compile the step or its gradients."""
    keras.utils.set_random_seed(4)
    with strategy.scope():
      model = common.linear(3, 1)
      optimizer = keras.optimizers.SGD(0.1)
      optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=kind == 'inside')
    def gradients_of(x):
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x) - x[:, :1]) ** 2) / 8
      return tape.gradient(loss, model.trainable_variables)

    def replica(x):
      optimizer.apply(gradients_of(x), model.trainable_variables)

    @tf.function(jit_compile=kind == 'outside')
    def step(x):
      strategy.run(replica, (x,))

    x = tf.reshape(tf.range(24.0), [8, 3]) / 24
    batches = tf.data.Dataset.from_tensors(x).unbatch().batch(8)
    [batch] = strategy.experimental_distribute_dataset(batches)
    step(batch)
    return model.get_weights()

  @parameterized.parameters(
    *_STRATEGIES, lambda d: tfs.CentralStorageStrategy(d[:1], d[1])
  )
  def test_compiled_step_is_refused_and_compiled_gradients_are_exact(
    self, make
  ):
    if links.nccl_is_usable(DEVICES):
      self.skipTest('XLA can compile such a step for these GPUs.')
    want = self.train(tf.distribute.get_strategy(), 'none')
    for kind in ('outside', 'inside'):
      strategy = make(DEVICES)
      if kind == 'outside' or isinstance(strategy, tfs.CentralStorageStrategy):
        with self.assertRaisesRegex(
          tfs.errors.UnsupportedOptionError, 'jit_compile=True.*strategy.step'
        ):
          self.train(strategy, kind)
      else:
        for a, b in zip(want, self.train(strategy, kind), strict=True):
          self.assertAllClose(a, b, 0, 1e-6)


if __name__ == '__main__':
  tf.test.main()
