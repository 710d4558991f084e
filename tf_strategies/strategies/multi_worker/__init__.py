"""Strategies whose replicas are on several workers: processes, or hosts."""

from tf_strategies.strategies.multi_worker.collective_strategy import (
  MultiWorkerCollectiveStrategy,
)
from tf_strategies.strategies.multi_worker.options import (
  CollectiveOptions,
  RingOptions,
)
from tf_strategies.strategies.multi_worker.ring_strategy import (
  MultiWorkerRingStrategy,
)

__all__ = [
  'CollectiveOptions',
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'RingOptions',
]
