"""Replicas on the devices of one host that share one copy of the variables."""

from tf_strategies.strategies.central_storage.strategy import (
  CentralStorageStrategy,
)

__all__ = ['CentralStorageStrategy']
