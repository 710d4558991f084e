"""Values on several logical CPUs, their exact sums, and every op.

Inputs are small integers that differ by rank and position. Every sum is
therefore exact in every dtype. An output that is shifted by one chunk or one
rank does not equal it.
"""

import functools

import numpy as np
import tensorflow as tf

from tests import virtual_devices
from tf_strategies import _tf_internal, cross_device
from tf_strategies.collectives.algorithms import ALGORITHMS

SUM = tf.distribute.ReduceOp.SUM
MEAN = tf.distribute.ReduceOp.MEAN

# Every algorithm, and the ops with further options.
OPS = {
  **{
    name: functools.partial(cross_device.ScheduledAllReduce, name)
    for name in ALGORITHMS
  },
  'auto': cross_device.AutoAllReduce,
}
NAMED_OPS = list(OPS.items())

# The difference between two ranks. Sums over 8 ranks stay below the dtype's
# last exact integer: 256 for bfloat16, 255 for uint8, 2048 for float16.
_RANK_STEP = {'int16': 100, 'bfloat16': 4, 'uint8': 4, 'float16': 32}

DTYPES = (
  'float16',
  'bfloat16',
  'float32',
  'float64',
  'int32',
  'int64',
  'uint8',
  'int16',
  'complex64',
)


def devices(count):
  return tuple(virtual_devices.names(count))


def on_devices(values, names):
  """Returns a distributed value with one component on each device."""
  components = []
  for value, name in zip(values, names, strict=True):
    with tf.device(name):
      components.append(tf.identity(value))
  return _tf_internal.PerReplica(components)


def all_reduced(op, reduce_op, arrays, names):
  """Returns an op's results for several values with one array per device."""
  values = [on_devices(ranks, names) for ranks in arrays]
  return op.batch_reduce(reduce_op, [(v, v) for v in values])


def inputs(dtype, shape, world_size, reduce_op=SUM):
  """Returns each rank's array. For MEAN, floats are multiples of `world_size`."""
  step = _RANK_STEP.get(dtype, 1000)
  numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
  positions = np.arange(int(np.prod(shape))).reshape(shape)
  if step != 1000:
    positions = positions % step
  arrays = [rank * step + positions for rank in range(world_size)]
  if dtype in ('int16', 'int32', 'int64'):
    # Negative sums with a remainder distinguish truncating from floor division.
    arrays = [a - 2500 for a in arrays]
    arrays[-1] = arrays[-1] + 1
  elif reduce_op == MEAN and dtype not in ('uint8', 'int16'):
    arrays = [a * world_size for a in arrays]
  if dtype == 'complex64':
    arrays = [a + 3j * (a[::-1] if a.ndim else a) for a in arrays]
  return [np.asarray(a).astype(numpy_dtype) for a in arrays]


def exact(arrays, reduce_op=SUM):
  """Returns the result that every rank must have, computed in 64 bits."""
  dtype = arrays[0].dtype
  if dtype.kind in 'iu':
    total = np.sum(np.asarray(arrays, np.int64), axis=0)
    if reduce_op == MEAN:
      total = total // len(arrays)
  else:
    wide = np.complex128 if dtype.kind == 'c' else np.float64
    total = np.sum([a.astype(wide) for a in arrays], axis=0)
    if reduce_op == MEAN:
      total = total / len(arrays)
  return np.asarray(total).astype(dtype)


def assert_equal(value, expected, names):
  """Checks the value, dtype and device of each component."""
  components = (value,) if isinstance(value, tf.Tensor) else value.values
  if isinstance(value, tf.Tensor) != (len(names) == 1):
    raise AssertionError(f'{type(value)} on {names}')
  if len(components) != len(names):
    raise AssertionError(f'{len(components)} components on {names}')
  for component, name in zip(components, names, strict=True):
    np.testing.assert_array_equal(component.numpy(), expected, strict=True)
    if component.dtype == tf.uint8 and virtual_devices.KIND == 'GPU':
      continue  # TensorFlow adds these on CPUs only.
    if not component.device.endswith(name):
      raise AssertionError(f'{component.device} instead of {name}')
