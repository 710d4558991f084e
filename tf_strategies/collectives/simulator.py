"""Runs a schedule on NumPy arrays: the reference for every executor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from tf_strategies import errors
from tf_strategies.collectives import compression as compression_lib
from tf_strategies.collectives import schedule as schedule_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
  """What came of a simulated schedule.

  Attributes:
    outputs: one array for each rank, of the inputs' shape and dtype.
    bytes_per_link: {(src, dst): bytes} as counted while moving them.
  """

  outputs: list[np.ndarray]
  bytes_per_link: dict[tuple[int, int], int]


def simulate(
  schedule: schedule_lib.Schedule,
  inputs: Sequence[np.ndarray],
  compression: compression_lib.Compression | None = None,
) -> Simulation:
  """Runs any schedule, right or wrong, on one array for each rank.

  The array is flattened and cut with `chunk_sizes`. In a round all sends read
  the state from before it; what arrives is added in the order of
  `Schedule.transfers`. With a compression each send is encoded, and sums are
  made in the codec's accumulator dtype. The rank that completes a chunk then
  rounds it as the wire does: it would otherwise keep a more precise value than
  it sends, and the ranks would drift apart.

  Example:

    >>> from tf_strategies.collectives.algorithms import ring
    >>> inputs = [np.arange(3) + 10 * rank for rank in range(2)]
    >>> simulate(ring.ring_all_reduce(2), inputs).outputs
    [array([10, 12, 14]), array([10, 12, 14])]

  Args:
    schedule: what to run. It need not be a correct all-reduce, but its ranks
      and chunks must be in range; with a compression it must be correct as
      far as `Schedule.completions` can tell.
    inputs: one numeric array for each rank, all of one shape (any, also 0-d
      and empty) and one dtype. They are not changed.
    compression: codec of the wire, None to send arrays as they are.

  Returns:
    A Simulation. O(T L / C) for T transfers and a buffer of L in C chunks.

  Raises:
    ScheduleError: not one input for each rank, inputs that disagree in shape
      or dtype, or a rank or chunk of the schedule out of range.
    UnsupportedOptionError: a dtype that cannot be added up (bool, strings,
      objects, dates).
  """
  schedule.check_ranges()
  arrays = _checked(inputs, schedule.world_size)
  shape, dtype = arrays[0].shape, arrays[0].dtype
  codec = compression or compression_lib.NoCompression()
  completions = schedule.completions() if codec.lossy else frozenset()
  sum_dtype = codec.accumulator_dtype(dtype)
  # A copy even where the dtype stays: the inputs are the caller's.
  state = [np.array(a, dtype=sum_dtype).reshape(-1) for a in arrays]
  chunks = _slices(arrays[0].size, schedule.num_chunks)

  moved: dict[tuple[int, int], int] = {}
  for transfers in schedule.rounds():
    for link, num_bytes in _run_round(transfers, state, chunks, codec):
      moved[link] = moved.get(link, 0) + num_bytes
    for dst, chunk in {(t.dst, t.chunk) for t in transfers}:
      if (transfers[0].round, dst, chunk) in completions:
        complete = state[dst][chunks[chunk]]
        complete[...] = codec.decompress(*codec.compress(complete))
  outputs = [a.astype(dtype).reshape(shape) for a in state]
  return Simulation(outputs, dict(sorted(moved.items())))


def _run_round(
  transfers: Sequence[schedule_lib.Transfer],
  state: Sequence[np.ndarray],
  chunks: Sequence[slice],
  codec: compression_lib.Compression,
) -> list[tuple[tuple[int, int], int]]:
  """Changes `state` and returns ((src, dst), bytes) for each transfer."""
  # Codecs may hand back what they were given, here a view of the state, which
  # this round may overwrite before the receiver has read it: hence the copies.
  sent = [
    codec.compress(state[t.src][chunks[t.chunk]].copy()) for t in transfers
  ]
  for t, (wire, ctx) in zip(transfers, sent, strict=True):
    received = codec.decompress(wire, ctx)
    if t.reduce:
      state[t.dst][chunks[t.chunk]] += received
    else:
      state[t.dst][chunks[t.chunk]] = received
  return [
    ((t.src, t.dst), wire.nbytes)
    for t, (wire, _) in zip(transfers, sent, strict=True)
  ]


def _checked(inputs: Sequence[np.ndarray], world_size: int) -> list[np.ndarray]:
  arrays = [np.asarray(array) for array in inputs]
  if len(arrays) != world_size:
    raise errors.ScheduleError(
      f'inputs has {len(arrays)} arrays, but the schedule has {world_size} '
      'ranks. Pass one array for each rank.'
    )
  first = arrays[0]
  for rank, array in enumerate(arrays):
    if array.shape != first.shape or array.dtype != first.dtype:
      raise errors.ScheduleError(
        f'inputs[{rank}] is {array.dtype}{array.shape}, inputs[0] is '
        f'{first.dtype}{first.shape}. All ranks must pass the same shape and '
        'dtype.'
      )
  if first.dtype.kind in 'bOSUMm':
    raise errors.UnsupportedOptionError(
      f'inputs of dtype {first.dtype}',
      'integers, floats and complex numbers',
      'cast them to a numeric dtype first',
    )
  return arrays


def _slices(length: int, num_chunks: int) -> list[slice]:
  sizes = schedule_lib.chunk_sizes(length, num_chunks)
  ends = itertools.accumulate(sizes)
  return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
