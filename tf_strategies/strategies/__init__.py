"""The strategies, one file each, and `create_strategy`, which takes a name."""

from tf_strategies.strategies.multi_worker.options import (
  CollectiveOptions,
  RingOptions,
)
from tf_strategies.strategies.registry import (
  STRATEGY_NAMES,
  CentralStorageStrategy,
  MultiWorkerCollectiveStrategy,
  MultiWorkerRingStrategy,
  ParameterServerStrategy,
  RingMirroredStrategy,
  TPURingStrategy,
  create_strategy,
)

__all__ = [
  'STRATEGY_NAMES',
  'CentralStorageStrategy',
  'CollectiveOptions',
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'ParameterServerStrategy',
  'RingMirroredStrategy',
  'RingOptions',
  'TPURingStrategy',
  'create_strategy',
]
