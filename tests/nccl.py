"""Functions that use NCCL on one whole GPU, or run without it on a CPU.

NCCL rejects two members on one GPU, so these groups have one member. This shows
that NCCL is found, starts and reduces. pytest's own process has split the GPU,
so each function runs in its own process. It must not import a module that calls
`virtual_devices.configure`.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from benchmarks import measure
from tests import virtual_devices
from tf_strategies import _tf_internal, cross_device

IS_GPU = virtual_devices.KIND == 'GPU'


def _device():
  tf.config.experimental.enable_tensor_float_32_execution(False)
  [device] = measure.split_device(virtual_devices.KIND.lower(), 1)
  return device


def _types(function, *args):
  """Returns the operations of a function's graph."""
  graph = function.get_concrete_function(*args).graph
  return [(o.type, o.device.lower()) for o in graph.get_operations()]


def auto_all_reduce(rank):
  """Returns the operations and results of `AutoAllReduce` for three dtypes."""
  del rank
  device, op = _device(), cross_device.AutoAllReduce()

  @tf.function
  def all_reduce(rows):
    with tf.device(device):
      values = [_tf_internal.PerReplica((tf.identity(r),)) for r in rows]
    return op.batch_reduce_implementation(
      tf.distribute.ReduceOp.MEAN, [(v, v) for v in values], None
    )

  rows = [tf.constant(r) for r in (np.float32([1, 2]), np.float64([3]), [4])]
  rows[2] = tf.cast(rows[2], tf.int64)
  return _types(all_reduce, rows), [r.numpy() for r in all_reduce(rows)]


def collective(rank, communication):
  """Returns operations, report and sums of `MultiWorkerCollectiveStrategy`."""
  del rank
  strategy = tfs.MultiWorkerCollectiveStrategy(
    options=tfs.CollectiveOptions(communication=communication),
    devices=[_device()],
  )

  @tf.function
  def all_reduce(rows):
    # A strategy with one replica does not reduce by itself.
    return strategy.extended.communicator.all_reduce([rows], 'rows')[0]

  rows = [tf.constant([1.0, 2.0]), tf.constant([3], tf.int64)]
  sums = [r.numpy() for r in all_reduce(rows)]
  return _types(all_reduce, rows), strategy.communication_report(), sums


def fit(rank, jit_compile):
  """Returns the distances of the weights from one device and from the initial weights."""
  del rank
  device = _device()
  strategy = tfs.MultiWorkerCollectiveStrategy(devices=[device])
  rng = np.random.default_rng(3)
  x = rng.normal(size=(32, 8)).astype(np.float32)
  y = rng.normal(size=(32, 2)).astype(np.float32)
  weights = []
  for scope in (tf.device(device), strategy.scope()):
    keras.utils.set_random_seed(5)
    with scope:
      model = keras.Sequential(
        [
          keras.Input([8]),
          keras.layers.Dense(16, 'relu'),
          keras.layers.Dense(2),
        ]
      )
      model.compile(
        keras.optimizers.SGD(0.1, clipnorm=0.5), 'mse', jit_compile=jit_compile
      )
      first = model.get_weights()
    with tf.device(device) if not weights else contextlib.nullcontext():
      model.fit(x, y, 16, epochs=2, shuffle=False, verbose=0)
    weights.append(model.get_weights())

  def difference(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))

  return (
    difference(*weights),
    difference(first, weights[1]),
    strategy.communication_report(),
  )
