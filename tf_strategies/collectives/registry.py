"""The algorithms by name, each as a function of the world size alone."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

from tf_strategies.collectives import schedule
from tf_strategies.collectives.algorithms import (
  direct,
  halving_doubling,
  hierarchical,
  naive,
  ring,
  tree,
)

BUILDERS: Mapping[str, Callable[[int], schedule.Schedule]] = (
  types.MappingProxyType(
    {
      'ring': ring.ring_all_reduce,
      'halving_doubling': halving_doubling.halving_doubling_all_reduce,
      'tree': tree.tree_all_reduce,
      'hierarchical': hierarchical.hierarchical_ring_all_reduce,
      'direct': direct.direct_all_reduce,
      'naive': naive.naive_all_reduce,
    }
  )
)
