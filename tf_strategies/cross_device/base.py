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
    is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
    results = [None] * len(value_destination_pairs)
    groups = {}
    for i, (given, destination) in enumerate(value_destination_pairs):
      values = as_tensors(given).values
      count = len(values) if is_mean else 1
      devices = tuple(_tf_internal.get_devices_from(destination))
      if isinstance(values[0], tf.IndexedSlices):
        results[i] = self._gather_slices(values, devices, count)
      else:
        holders = _holders(values)
        way = (self._reduce_to,)
        if destination is given or devices == holders:
          devices = holders
          way = self._way(devices, values[0].dtype)
        values = divided(values, holders, count, is_before=True)
        groups.setdefault((devices, *way), []).append((i, count, values))
    for (devices, reduce, *_), members in groups.items():
      sums = reduce([values for *_, values in members], devices)
      for (i, count, _), parts in zip(members, sums, strict=True):
        results[i] = wrap(divided(parts, devices, count, is_before=False))
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
    return wrap(executor.on_each(devices, lambda: tf.concat(values, axis)))

  def _way(self, devices, dtype):
    """Returns the method that adds up values of a dtype over the devices.

    It gets the values together for which all that this returns is equal.
    """
    del devices, dtype
    return (self._reduce_everywhere,)

  def _reduce_everywhere(self, values, devices):
    """Adds up dense values over `devices` in one plan.

    Args:
      values: for each value its tensors, by device.
      devices: the devices.

    Returns:
      The sums, in the same structure.
    """
    check_tensors(values)
    tensors = list(zip(*values, strict=True))
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
    sums = executor.execute(schedule, layout, tensors, devices)
    return zip(*sums, strict=True)

  def _reduce_to(self, values, devices):
    """Adds up on devices other than those that hold the values."""
    check_tensors(values)
    received = sum(_bytes_from_others(parts, devices[0]) for parts in values)
    copied = sum(bytes_of(parts[0]) for parts in values)
    self._statistics['reduce'].record(
      devices, [received] + [copied] * (len(devices) - 1)
    )
    sums = []
    for parts in values:
      away = executor.elsewhere(_holders(parts), devices[0])
      with tf.device(devices[0]):
        total = executor.add(parts, away)
      copies = executor.on_each(devices[1:], lambda t=total: tf.identity(t))
      sums.append([total, *copies])
    return sums

  def _gather_slices(self, slices, devices, count):
    """Gathers `tf.IndexedSlices`, over `count`, on every destination device.

    The gradient of an embedding is a list of rows, which may contain a row
    several times. The concatenated list equals one device's, so the optimizer
    and gradient clipping work on the same values.
    """
    rows = [s.values for s in slices]
    indices = [s.indices for s in slices]
    self._statistics['all_reduce'].record(
      devices, [_bytes_from_others([*rows, *indices], d) for d in devices]
    )
    if count > 1:
      holders = [part.device for part in rows]
      rows = executor.on_each(
        holders, lambda part: executor.divide(part, count), rows
      )
    shape = slices[0].dense_shape

    def concat():
      return tf.IndexedSlices(
        tf.concat(rows, 0),
        tf.concat(indices, 0),
        None if shape is None else tf.identity(shape),
      )

    return wrap(executor.on_each(devices, concat))


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


def wrap(values):
  """Returns a single value unchanged, several values as a `Mirrored`."""
  if len(values) == 1:
    return values[0]
  return _tf_internal.regroup(
    tuple(values), wrap_class=_tf_internal.Mirrored, always_wrap=True
  )


def copied(values, devices):
  """Returns copies of tensors or slices, each on its device."""

  def copy(value):
    return tf.nest.map_structure(tf.identity, value, expand_composites=True)

  return executor.on_each(devices, copy, values)


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


def _holders(values) -> tuple[str, ...]:
  """Returns the full names of the devices that hold the values of replicas.

  In a graph, arguments and variables may not have a device yet. A strategy's
  replicas define the devices of its values. Other values keep an empty name,
  and TensorFlow places their results.
  """
  devices = [v.device for v in values]
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


def divided(tensors, devices, count, is_before):
  """Divides tensors, each on its device; see `executor.divide_beside_sum`."""
  return executor.on_each(
    devices,
    lambda tensor: executor.divide_beside_sum(tensor, count, is_before),
    tensors,
  )


def check_tensors(values) -> None:
  """Rejects dtypes without a sum, and replicas that disagree.

  `values` are the tensors of all replicas, for each value.
  """
  for i, tensors in enumerate(values):
    first = tensors[0]
    dtype = first.dtype
    option_checks.check(
      dtype.is_floating or dtype.is_integer or dtype.is_complex,
      f'an all-reduce of dtype {dtype.name}',
      'a float, complex or integer dtype',
      'cast the value first, for instance bool to int32',
    )
    for rank, tensor in enumerate(tensors):
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
