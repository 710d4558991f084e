"""Runs a schedule on NumPy arrays: the reference for every executor."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import ml_dtypes  # noqa: F401
import numpy as np

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
) -> Simulation:
  """Runs any schedule, correct or not, on one array for each rank.

  The array is flattened and cut with `chunk_sizes`. In a round all sends read the
  state before the round, and received chunks are added in rank order. 16-bit floats
  are added in float32 and rounded after each round.

  Example:

    >>> from tf_strategies.collectives.algorithms import ring
    >>> inputs = [np.arange(3) + 10 * rank for rank in range(2)]
    >>> simulate(ring.ring_all_reduce(2), inputs).outputs
    [array([10, 12, 14]), array([10, 12, 14])]

  Args:
    schedule: the schedule.
    inputs: one numeric array for each rank, all of one shape (any, also 0-d
      and empty) and one dtype. They are not changed.

  Returns:
    A Simulation. O(T L / C) for T transfers and a buffer of L in C chunks.
  """
  arrays = [np.asarray(array) for array in inputs]
  shape, sum_dtype = arrays[0].shape, reductions.sum_dtype(arrays[0].dtype)
  sizes = schedule_lib.chunk_sizes(arrays[0].size, schedule.num_chunks)
  ends = list(itertools.accumulate(sizes))
  slices = [slice(e - size, e) for e, size in zip(ends, sizes, strict=True)]
  # Copies, because the inputs must not change.
  values = [np.array(array).reshape(-1) for array in arrays]
  moved: collections.Counter[tuple[int, int]] = collections.Counter()
  for arrivals in schedule.arrivals():
    # Everything is sent before anything is received: a round is simultaneous.
    sent = {
      (t.src, t.chunk): values[t.src][slices[t.chunk]].copy()
      for transfers in arrivals.values()
      for t in transfers
    }
    for (dst, chunk), transfers in arrivals.items():
      for t in transfers:
        moved[t.src, dst] += sent[t.src, chunk].nbytes
      own = values[dst][slices[chunk]]
      terms = [
        (own if r == dst else sent[r, chunk]).astype(sum_dtype)
        for r in schedule_lib.rank_order(dst, transfers)
      ]
      own[:] = functools.reduce(np.add, terms)
  outputs = [value.reshape(shape) for value in values]
  return Simulation(outputs, dict(sorted(moved.items())))
