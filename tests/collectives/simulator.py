"""Runs a schedule on NumPy arrays: the reference for every executor."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import ml_dtypes  # noqa: F401
import numpy as np

from tf_strategies.collectives import codec as codec_lib
from tf_strategies.collectives import codecs
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.process_group import reductions


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
  """The result of a simulated schedule.

  Attributes:
    outputs: one array for each rank, of the inputs' shape and dtype.
    bytes_per_link: {(src, dst): bytes} as counted while moving them.
  """

  outputs: list[np.ndarray]
  bytes_per_link: dict[tuple[int, int], int]


def simulate(
  schedule: schedule_lib.Schedule,
  inputs: Sequence[np.ndarray],
  compression: str = 'none',
  op: str = 'sum',
) -> Simulation:
  """Runs any schedule, right or wrong, on one array for each rank.

  The array is flattened and cut with `chunk_sizes`. In a round all sends read
  the state from before it; what arrives is added in rank order.

  Example:

    >>> from tf_strategies.collectives.algorithms import ring
    >>> inputs = [np.arange(3) + 10 * rank for rank in range(2)]
    >>> simulate(ring.ring_all_reduce(2), inputs).outputs
    [array([10, 12, 14]), array([10, 12, 14])]

  Args:
    schedule: with a codec, correct as far as `Schedule.completions` can tell.
    inputs: one numeric array for each rank, all of one shape (any, also 0-d
      and empty) and one dtype. They are not changed.
    compression: name of a codec, used as `codec` describes.
    op: a name in `reductions.REDUCTIONS`.

  Returns:
    A Simulation. O(T L / C) for T transfers and a buffer of L in C chunks.

  Raises:
    ScheduleError: a rank or chunk of the schedule is out of range.
    UnsupportedOptionError: there is no such codec.
  """
  schedule.check_ranges()
  arrays = [np.asarray(array) for array in inputs]
  shape, dtype = arrays[0].shape, arrays[0].dtype
  codec = codecs.for_array(compression, dtype)
  if codec is codecs.NONE:
    codec, sum_dtype, completions = None, dtype, frozenset()
  else:
    sum_dtype, completions = codec_lib.sum_dtype(dtype), schedule.completions()
  sizes = schedule_lib.chunk_sizes(arrays[0].size, schedule.num_chunks)
  ends = list(itertools.accumulate(sizes))
  slices = [slice(e - size, e) for e, size in zip(ends, sizes, strict=True)]
  ranks = [
    _Rank(
      # A copy even where the dtype stays: the inputs are the caller's.
      np.array(array, dtype=sum_dtype).reshape(-1),
      slices,
      codec,
    )
    for array in arrays
  ]
  moved: collections.Counter[tuple[int, int]] = collections.Counter()
  for arrivals in schedule.arrivals():
    # Everything is sent before anything is received: a round is simultaneous.
    sent = {
      (t.src, t.chunk): ranks[t.src].send(t.chunk)
      for transfers in arrivals.values()
      for t in transfers
    }
    for (dst, chunk), transfers in arrivals.items():
      for t in transfers:
        came = sent[t.src, chunk]
        moved[t.src, dst] += came.nbytes
      order = schedule_lib.rank_order(dst, transfers)
      terms = [None if r == dst else sent[r, chunk] for r in order]
      ranks[dst].receive(
        chunk, terms, transfers[-1].reduce, reductions.REDUCTIONS[op]
      )
      if (transfers[0].round, dst, chunk) in completions:
        ranks[dst].send(chunk)
  outputs = [rank.values.astype(dtype).reshape(shape) for rank in ranks]
  return Simulation(outputs, dict(sorted(moved.items())))


def encode(codec: codec_lib.Codec, values: np.ndarray) -> np.ndarray:
  """Returns the payload of some values."""
  payload = np.empty(codec.payload_bytes(len(values)), np.uint8)
  codec.encode(values, payload)
  return payload


def round_trip(codec: codec_lib.Codec, values: np.ndarray) -> np.ndarray:
  """Returns the values that arrive."""
  out = np.empty_like(values)
  codec.decode(encode(codec, values), out)
  return out


class _Rank:
  """What one rank holds; without a codec, if that is None."""

  def __init__(self, values, slices, codec):
    self.values = values
    self._slices = slices
    self._codec = codec
    self._payloads: dict[int, np.ndarray] = {}

  def send(self, chunk: int) -> np.ndarray:
    """Returns a chunk as it travels; the rank keeps the same."""
    place = self._slices[chunk]
    if self._codec is None:
      return self.values[place].copy()
    if chunk not in self._payloads:
      payload = encode(self._codec, self.values[place])
      self._codec.decode(payload, self.values[place])
      self._payloads[chunk] = payload
    return self._payloads[chunk]

  def receive(self, chunk, terms, reduce, ufunc) -> None:
    """Takes the values of one round, in the order of ranks; None is its own."""
    place = self._slices[chunk]
    # An addition makes a new value; a copy is forwarded unchanged.
    self._payloads.pop(chunk, None)
    if self._codec is not None and not reduce:
      self._payloads[chunk] = terms[-1]
    total = None
    for sent in terms:
      value = self.values[place] if sent is None else sent
      if self._codec is not None and sent is not None:
        value = np.empty_like(self.values[place])
        self._codec.decode(sent, value)
      total = value.copy() if total is None else ufunc(total, value)
    self.values[place] = total
