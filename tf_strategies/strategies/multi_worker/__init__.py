"""Strategies whose replicas are on several workers: processes, or hosts."""

from tf_strategies.strategies.multi_worker.collective_strategy import (
  MultiWorkerCollectiveStrategy,
)
from tf_strategies.strategies.multi_worker.ring_strategy import (
  MultiWorkerRingStrategy,
  RingOptions,
)

__all__ = [
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'RingOptions',
]
