"""Adds up what came from all ranks, in rank order.

Where every rank does this for itself, the order makes the sums bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tf_strategies.collectives import compression

Combine = Callable[[int, int], None]


def combiner(
  array: np.ndarray,
  stage: np.ndarray,
  out: np.ndarray,
  rank: int,
  low: int,
  ufunc: np.ufunc,
  wire_name: str,
) -> Combine:
  """What combines, in rank order, a stretch of what all ranks sent.

  Args:
    array: of this rank.
    stage: one row for each rank; of this one empty.
    out: where the result goes.
    rank: this one.
    low: the element of `array` that is the first of each row.
    ufunc: what combines.
    wire_name: the encoding of all of them.

  Returns:
    A function of the first byte in `out`, and the byte after the last.
  """

  def rows(start: int, stop: int) -> list[np.ndarray]:
    here = stage[:, start - low : stop - low]
    return [
      array[start:stop] if r == rank else here[r] for r in range(len(stage))
    ]

  def combine(start: int, stop: int) -> None:
    first, last = start // array.itemsize, stop // array.itemsize
    target, others = out[first:last], rows(first, last)
    ufunc(others[0], others[1], out=target)
    for row in others[2:]:
      ufunc(target, row, out=target)

  def combine_encoded(start: int, stop: int) -> None:
    first, last = start // array.itemsize, stop // array.itemsize
    codec = compression.by_name(wire_name)
    is_half = wire_name == 'float16'
    total = None
    for row in rows(first, last):
      values = row.view(np.float16) if is_half else row
      decoded = codec.decompress(values, np.dtype(np.float32))
      total = decoded if total is None else ufunc(total, decoded, out=total)
    out[first:last] = codec.compress(total)[0].view(np.uint16)

  return combine if wire_name == 'none' else combine_encoded
