"""A worker's side of `planner`: measures links, and reduces as it is told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_strategies import process_group


class Actor:
  """One worker; `pool_worker` calls the methods.

  Args:
    rank: of this worker.
  """

  def __init__(self, rank: int):
    self._rank = rank

  def set_up(self, addresses: Sequence[str]) -> None:
    """Forms the group."""
    self._rendezvous = process_group.Rendezvous(
      dict(enumerate(addresses)),
      self._rank,
      process_group.GroupOptions.from_env(),
    )
    self._group = self._rendezvous.form()

  def measure_links(self) -> dict[str, Any]:
    """What links cost, and how long it took to find that out."""
    began = time.perf_counter()
    topology = self._group.measure_links()
    return {
      'pairs': [
        [(link.alpha_seconds, link.beta_seconds_per_byte) for link in row]
        for row in topology.pairs
      ],
      'group_size': topology.group_size,
      'gamma': topology.gamma_seconds_per_byte,
      'factors': topology.factors,
      'seconds': time.perf_counter() - began,
    }

  def run(
    self, buckets: Sequence[int], how: Mapping[str, str], repeats: int
  ) -> list[float]:
    """Reduces all buckets one after the other; seconds of each repeat.

    Raises:
      RuntimeError: a sum is wrong.
    """
    size = self._group.world_size
    arrays = [
      np.full(n // 4, self._group.rank + 1, np.float32) for n in buckets
    ]
    outs = [np.empty_like(array) for array in arrays]
    seconds = []
    for _ in range(1 + repeats):  # The first makes links and plans.
      self._group.barrier()
      began = time.perf_counter()
      for index, (array, out) in enumerate(zip(arrays, outs, strict=True)):
        self._group.all_reduce(array, out=out, name=f'{index}', **how)
      seconds.append(time.perf_counter() - began)
    for out in outs:
      if not np.allclose(out, size * (size + 1) / 2, rtol=0.02):
        raise RuntimeError(f'{how}: the sum is {out[:1]}')
    return seconds[1:]
