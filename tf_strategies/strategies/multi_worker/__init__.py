"""Strategies whose replicas are on several workers: processes, or hosts."""

from tf_strategies.strategies.multi_worker.ring_strategy import (
  MultiWorkerRingStrategy,
  RingOptions,
)

__all__ = ['MultiWorkerRingStrategy', 'RingOptions']
