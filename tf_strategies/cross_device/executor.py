"""Executes a `Schedule` as TensorFlow ops on the devices of one process.

A schedule defines which rank sends which chunk to which rank in each round.
Here a chunk is a *list of tensors* (or of slices of tensors), so that whole
tensors travel without being concatenated. Between devices that share memory,
copies cost more than additions.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_strategies.collectives import layout as layout_lib
from tf_strategies.collectives import schedule as schedule_lib

# Sums of 16-bit values are accumulated in float32 and rounded once a hop.
_HALVES = (tf.float16, tf.bfloat16)


def share_memory(devices: Sequence[str]) -> bool:
  """Returns whether copies between devices cost nothing, because all are CPUs.

  A tensor that TensorFlow has not placed yet has an empty name. It counts as a
  CPU if the process has no other devices.
  """
  return all(
    'cpu' in name.lower()
    for device in devices
    for name in (
      [device] if device else [d.name for d in tf.config.list_logical_devices()]
    )
  )


def on_each(
  devices: Sequence[str], make: Callable[..., Any], *rows: Iterable[Any]
) -> list[Any]:
  """Returns what `make` makes on each device, of the device's values in the rows."""
  made = []
  for device, *own in zip(devices, *rows, strict=True):
    with tf.device(device):
      made.append(make(*own))
  return made


def elsewhere(devices: Sequence[str], here: str) -> list[str] | None:
  """Returns `devices` with `here` replaced by another of them; see `add`.

  Returns None if there is no other device, or if a copy between them is not
  free.
  """
  others = [d for d in devices if d != here]
  if not others or not share_memory([here, *devices]):
    return None
  return [others[0] if d == here else d for d in devices]


def add(
  tensors: Sequence[tf.Tensor], away: Sequence[str] | None = None
) -> tf.Tensor:
  """Returns the sum of tensors of one dtype, 16-bit floats through float32.

  TensorFlow assumes that a logical CPU has 256 MiB. If a graph may need 80% of it,
  the memory optimizer changes sums of three or more tensors, one of which is on
  that device. It adds the tensors to a variable in their order of arrival, which
  takes twice the time and rounds differently in each run. It does not change a sum
  whose terms all come from other devices.

  Args:
    tensors: tensors to add.
    away: for each tensor, a device other than the current one through which it
      passes. Only for devices that share memory, where this costs nothing.
  """
  if len(tensors) == 1:
    return tf.identity(tensors[0])
  if away is None or len(tensors) == 2 or tf.executing_eagerly():
    terms = [_widen(t) for t in tensors]
  else:
    terms = [_via(d, t) for d, t in zip(away, tensors, strict=True)]
  return tf.cast(tf.add_n(terms), tensors[0].dtype)


def _widen(tensor):
  return tf.cast(tensor, tf.float32) if tensor.dtype in _HALVES else tensor


def _via(device, tensor):
  """Returns `tensor`, widened for a sum, from `device`."""
  if tensor.device == device and tensor.dtype not in _HALVES:
    return tensor
  with tf.device(device):
    wide = _widen(tensor)
    # TensorFlow would remove an identity, and the tensor would be local again.
    return tf.raw_ops.PlaceholderWithDefault(input=wide, shape=wide.shape)


def divide(tensor: tf.Tensor, count: int) -> tf.Tensor:
  """Returns `tensor / count` in the tensor's own dtype; integers floor."""
  if tensor.dtype.is_integer:
    return tensor // count
  return tf.cast(_widen(tensor) / count, tensor.dtype)


def divide_beside_sum(
  tensor: tf.Tensor, count: int, is_before: bool
) -> tf.Tensor:
  """Divides a term before a sum, or the sum after it, where it is time for that.

  Before a sum is the time for 16-bit floats, because their sum may overflow although
  the mean does not. After it is the time for all others.
  """
  if count > 1 and (tensor.dtype in _HALVES) == is_before:
    return divide(tensor, count)
  return tensor


def execute(
  schedule: schedule_lib.Schedule,
  layout: Sequence[layout_lib.ChunkPiece],
  values: Sequence[Sequence[tf.Tensor]],
  devices: Sequence[str],
) -> list[list[tf.Tensor]]:
  """Runs `schedule` over `values` and returns every rank's results.

  Args:
    schedule: an all-reduce of `len(devices)` ranks.
    layout: the pieces of the tensors. A tensor of unknown size is one empty piece,
      which stands for all of it.
    values: `values[rank][i]` is tensor `i` of that rank; shapes and dtypes
      agree between ranks.
    devices: the device of each rank, on which its additions run.

  Returns:
    `results[rank][i]`: the reduced tensor `i` on that rank's device. Bit-equal
    on all ranks, since each chunk's sum is computed once and copied.
  """
  chunks = [
    [p for p in layout if p.chunk == c] for c in range(schedule.num_chunks)
  ]
  state = on_each(devices, lambda tensors: _cut(tensors, layout), values)
  for arrivals in schedule.arrivals():
    received = {}
    for (dst, chunk), sources in arrivals.items():
      with tf.device(devices[dst]):
        ranks = schedule_lib.rank_order(dst, sources)
        away = elsewhere([devices[rank] for rank in ranks], devices[dst])
        for p in chunks[chunk]:
          received[dst, p] = add([state[rank][p] for rank in ranks], away)
    # Written last, because every transfer of a round reads the state before it.
    for (dst, p), total in received.items():
      state[dst][p] = total

  return on_each(devices, _join, state, values)


def _cut(tensors, layout):
  """Returns one rank's tensors by the pieces of a layout."""
  cut = {p.tensor for p in layout if p.start}
  state = {}
  for p in layout:
    state[p] = tensor = tensors[p.tensor]
    if p.tensor in cut:
      flat = tf.reshape(tensor, [-1])
      # A slice is a view if its start and length are multiples of 64 bytes.
      state[p] = tf.slice(flat, [p.start], [p.stop - p.start])
  return state


def _join(state, like):
  """Joins one rank's pieces, which are in order, in the shapes of `like`."""
  results = []
  for i, pieces in itertools.groupby(state, lambda p: p.tensor):
    parts, shape = [state[p] for p in pieces], like[i].shape
    if len(parts) == 1:
      results += parts
      continue
    if not shape.is_fully_defined():
      shape = tf.shape(like[i])
    results.append(tf.reshape(tf.concat(parts, 0), shape))
  return results
