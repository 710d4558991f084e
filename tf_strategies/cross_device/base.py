"""The template of every cross-device op: it moves values and counts the bytes."""

import contextlib
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_strategies import _tf_internal, errors, option_checks
from tf_strategies.collectives import algorithms
from tf_strategies.collectives import layout as layout_lib
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.cross_device import executor, statistics

_KINDS = ('all_reduce', 'reduce', 'gather', 'broadcast')


# In bytes. Cutting smaller tensors takes longer than it saves.
_CUT_ABOVE = 16 * 1024


@option_checks.has_options
class ScheduledAllReduce(tf.distribute.CrossDeviceOps):
  """A `tf.distribute.CrossDeviceOps` that executes a `Schedule`.

  Example:

    >>> import tensorflow as tf
    >>> strategy = tf.distribute.MirroredStrategy(
    ...   ['CPU:0', 'CPU:1'],
    ...   cross_device_ops=ScheduledAllReduce('halving_doubling'))

  Rules that hold for every algorithm:

  * SUM and MEAN of every float, complex and integer dtype. 16-bit floats are
    accumulated in float32 and rounded once a hop. MEAN keeps the dtype: the
    mean of integers is their sum floor-divided by the number of replicas.
  * Integer sums, also for a MEAN, wrap around as `tf.add` does.
  * All replicas end with bit-equal results.
  * `tf.IndexedSlices` are gathered, duplicates kept, as TensorFlow does.
  * Gradients flow through: the ops are differentiable TensorFlow ops.

  Args:
    algorithm: one of

      * 'ring': each link carries 2(N-1)/N of the bytes, the least that any
        all-reduce can do, in 2(N-1) rounds.
      * 'direct': each device adds up a share, and sends it to all: a ring's
        bytes in two rounds.
      * 'halving_doubling': a ring's bytes in 2 log2(N) rounds, where N is a
        power of two.
      * 'tree': the fewest rounds for small tensors, over a binomial tree.
      * 'hierarchical': rings in groups of devices, and rings across the groups.
        'hierarchical(4)' makes groups of 4 consecutive devices. By default the
        size is the divisor of N that is nearest to its square root.
      * 'naive': one device adds up everything: the slow baseline.
      * 'one_shot': each device sends everything to all others, in one round.

  Raises:
    UnsupportedOptionError: if the algorithm is unknown. Later also for a dtype
      without a sum (bool, string), or if replicas have different static shapes
      or dtypes.
  """

  def __init__(self, algorithm: str):
    super().__init__()
    self._algorithm = algorithms.check(algorithm)
    self._statistics = {k: statistics.CallStatistics() for k in _KINDS}
    # Bytes that each rank receives in the most recently built all-reduce.
    self.last_bytes_in: tuple[int, ...] = ()

  def schedule(
    self, devices: Sequence[str], num_bytes: int
  ) -> schedule_lib.Schedule:
    """Returns the schedule for an all-reduce of `num_bytes` over `devices`."""
    del num_bytes
    return algorithms.build(self._algorithm, len(devices))

  def _cut_above(self, devices: Sequence[str]) -> float:
    """Returns the bytes above which a tensor may be cut, to balance the links."""
    # Between CPUs, the shares of 'direct' are whole tensors. Each sum is one
    # fused addition, and nothing is cut or concatenated.
    is_whole = self._algorithm == 'direct' and executor.share_memory(devices)
    return math.inf if is_whole else _CUT_ABOVE

  @property
  def calls(self) -> int:
    """Returns how many all-reduces the graph executed."""
    return self._statistics['all_reduce'].calls

  def report(self) -> dict[str, object]:
    """Returns the executed calls of each kind, and the bytes received by each
    device.
    """
    name = type(self).__name__
    if type(self) is ScheduledAllReduce:
      name = f'{name}({self._algorithm!r})'
    return {
      'cross_device_ops': name,
      'calls': {k: s.calls for k, s in self._statistics.items()},
      'all_reduce_bytes_in': self._statistics['all_reduce'].bytes_in(),
      'reduce_bytes_in': self._statistics['reduce'].bytes_in(),
    }

  def reduce_implementation(
    self, reduce_op, per_replica_value, destinations, options
  ):
    """Reduces one value; see `tf.distribute.CrossDeviceOps.reduce`."""
    return self.batch_reduce_implementation(
      reduce_op, [(per_replica_value, destinations)], options
    )[0]

  def batch_reduce_implementation(
    self, reduce_op, value_destination_pairs, options
  ):
    """Reduces several values in one plan; see `CrossDeviceOps.batch_reduce`."""
    del options
    results = [None] * len(value_destination_pairs)
    groups = {}
    for i, (value, destination) in enumerate(value_destination_pairs):
      given, value = value, as_tensors(value)
      devices = tuple(_tf_internal.get_devices_from(destination))
      if isinstance(value.values[0], tf.IndexedSlices):
        results[i] = self._reduce_slices(reduce_op, value.values, devices)
      else:
        holders = _holders(value)
        way = (self._reduce_to,)
        if destination is given or devices == holders:
          devices = holders
          way = self._way(devices, value.values[0].dtype)
        groups.setdefault((devices, *way), []).append((i, value))
    for (devices, reduce, *_), members in groups.items():
      reduced = reduce(reduce_op, [value for _, value in members], devices)
      for (i, _), result in zip(members, reduced, strict=True):
        results[i] = result
    return results

  def broadcast_implementation(self, tensor, destinations):
    """Copies `tensor` to every destination device; slices stay slices."""
    devices = tuple(_tf_internal.get_devices_from(destinations))
    self._statistics['broadcast'].record(devices)
    return super().broadcast_implementation(tensor, destinations)

  def _gather_implementation(
    self, per_replica_value, destinations, axis, options
  ):
    """Concatenates the replicas' tensors along `axis` on each destination."""
    del options
    devices = tuple(_tf_internal.get_devices_from(destinations))
    values = as_tensors(per_replica_value).values
    self._statistics['gather'].record(devices)
    return wrap(_on_each(devices, lambda: tf.concat(values, axis)))

  def _way(self, devices, dtype):
    """Returns the method that reduces values of a dtype over the devices.

    It gets the values together for which all that this returns is equal.
    """
    del devices, dtype
    return (self._reduce_everywhere,)

  def _reduce_everywhere(self, reduce_op, values, devices):
    """Reduces dense values over `devices` in one plan. Every device gets the results."""
    check_tensors(values)
    tensors = [[v.values[r] for v in values] for r in range(len(devices))]
    num_bytes = sum(bytes_of(t) for t in tensors[0])
    schedule = self.schedule(devices, num_bytes)
    layout = layout_lib.plan_layout(
      # A tensor of unknown size is not cut.
      [t.shape.num_elements() or 0 for t in tensors[0]],
      [t.dtype.size for t in tensors[0]],
      schedule.num_chunks,
      self._cut_above(devices),
    )
    chunk_bytes = [0] * schedule.num_chunks
    for piece in layout:
      size = tensors[0][piece.tensor].dtype.size
      chunk_bytes[piece.chunk] += (piece.stop - piece.start) * size
    self.last_bytes_in = schedule.bytes_in(chunk_bytes)
    self._statistics['all_reduce'].record(devices, self.last_bytes_in)
    divide_by = len(devices) if _is_mean(reduce_op) else 1
    results = executor.execute(schedule, layout, tensors, devices, divide_by)
    return [
      mirrored([results[r][i] for r in range(len(devices))])
      for i in range(len(values))
    ]

  def _reduce_to(self, reduce_op, values, devices):
    """Reduces to devices other than those that hold the values."""
    check_tensors(values)
    tensors = [list(v.values) for v in values]
    received = sum(_bytes_from_others(parts, devices[0]) for parts in tensors)
    copied = sum(bytes_of(parts[0]) for parts in tensors)
    self._statistics['reduce'].record(
      devices, [received] + [copied] * (len(devices) - 1)
    )
    results = []
    for parts, value in zip(tensors, values, strict=True):
      away = executor.elsewhere(_holders(value), devices[0])
      with tf.device(devices[0]):
        reduced = executor.add(
          parts, away, len(parts) if _is_mean(reduce_op) else 1
        )
      copies = _on_each(devices[1:], lambda r=reduced: tf.identity(r))
      results.append(wrap([reduced, *copies]))
    return results

  def _reduce_slices(self, reduce_op, slices, devices):
    """Gathers `tf.IndexedSlices` on every destination device.

    The gradient of an embedding is a list of rows, which may contain a row
    several times. The concatenated list equals one device's, so the optimizer
    and gradient clipping work on the same values.
    """
    rows = [s.values for s in slices]
    indices = [s.indices for s in slices]
    self._statistics['all_reduce'].record(
      devices, [_bytes_from_others([*rows, *indices], d) for d in devices]
    )
    if _is_mean(reduce_op):
      for i, part in enumerate(rows):
        with tf.device(part.device):
          rows[i] = executor.divide(part, len(rows))
    shape = slices[0].dense_shape

    def concat():
      return tf.IndexedSlices(
        tf.concat(rows, 0),
        tf.concat(indices, 0),
        None if shape is None else tf.identity(shape),
      )

    return wrap(_on_each(devices, concat))


class RingAllReduce(ScheduledAllReduce):
  """Ring all-reduce: reduce-scatter, then all-gather, around a ring.

  The same as `ScheduledAllReduce('ring')` (Patarasuk and Yuan, 2009). Needs no
  NCCL, so it also runs on virtual GPUs and CPUs. Chunks have equally many bytes:
  fewer than N tensors are cut, and the others travel whole.

  Example:

    >>> import tensorflow as tf
    >>> strategy = tf.distribute.MirroredStrategy(
    ...   ['CPU:0', 'CPU:1'], cross_device_ops=RingAllReduce())
  """

  def __init__(self) -> None:
    super().__init__('ring')


def _on_each(devices, make):
  """Calls `make` on each device, and returns the values."""
  values = []
  for device in devices:
    with tf.device(device):
      values.append(make())
  return values


def wrap(values):
  """Returns a single value unchanged, several values as a `Mirrored`."""
  return values[0] if len(values) == 1 else mirrored(values)


def copied(values, devices):
  """Returns copies of tensors or slices, each on its device."""
  found = []
  for value, device in zip(values, devices, strict=True):
    with tf.device(device):
      found.append(
        tf.nest.map_structure(tf.identity, value, expand_composites=True)
      )
  return found


def mirrored(values):
  """Returns a `Mirrored` of one value for each device."""
  return _tf_internal.regroup(
    tuple(values), wrap_class=_tf_internal.Mirrored, always_wrap=True
  )


def as_tensors(value):
  """Returns `value` with tensors as components, or with slices on all replicas.

  NumPy arrays have no device. Slices become dense if another replica has a
  dense gradient, for example because a variable is used densely in one branch
  only.
  """
  if all(isinstance(v, tf.IndexedSlices) for v in value.values):
    return value
  tensors = []
  for v in value.values:
    with tf.device(v.device) if tf.is_tensor(v) else contextlib.nullcontext():
      tensors.append(tf.convert_to_tensor(v))
  return _tf_internal.PerReplica(tensors)


def _holders(value) -> tuple[str, ...]:
  """Returns the full names of the devices that hold a distributed value.

  In a graph, arguments and variables may not have a device yet. A strategy's
  replicas define the devices of its values. Other values keep an empty name,
  and TensorFlow places their results.
  """
  devices = [v.device for v in value.values]
  if not all(devices) and tf.distribute.has_strategy():
    replicas = tf.distribute.get_strategy().extended.worker_devices
    if len(replicas) == len(devices):
      devices = [d or r for d, r in zip(devices, replicas, strict=True)]
  return tuple(_tf_internal.resolve_device(d) if d else '' for d in devices)


def _bytes_from_others(tensors, device: str) -> int:
  """Returns the bytes of the `tensors` that `device` has to fetch."""
  device = _tf_internal.resolve_device(device)
  return sum(
    bytes_of(t)
    for t in tensors
    if not t.device or _tf_internal.resolve_device(t.device) != device
  )


def _is_mean(reduce_op) -> bool:
  return reduce_op == tf.distribute.ReduceOp.MEAN


def check_tensors(values) -> None:
  """Rejects dtypes without a sum, and replicas that disagree."""
  for i, value in enumerate(values):
    first = value.values[0]
    dtype = first.dtype
    option_checks.check(
      dtype.is_floating or dtype.is_integer or dtype.is_complex,
      f'an all-reduce of dtype {dtype.name}',
      'a float, complex or integer dtype',
      'cast the value first, for instance bool to int32',
    )
    for rank, tensor in enumerate(value.values):
      if tensor.dtype != dtype or not tensor.shape.is_compatible_with(
        first.shape
      ):
        raise errors.UnsupportedOptionError(
          f'tensor {i} of replica {rank} with shape {tensor.shape} and dtype '
          f'{tensor.dtype.name}',
          f'shape {first.shape} and dtype {dtype.name}, as on replica 0',
          'reduce along the batch first, or use strategy.gather for uneven '
          'values',
        )


def bytes_of(tensor: tf.Tensor) -> int:
  """Returns the bytes of a tensor, or zero while its shape is unknown."""
  return (tensor.shape.num_elements() or 0) * tensor.dtype.size
