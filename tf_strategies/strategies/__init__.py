"""The strategies, one file each, and `create_strategy`, which takes a name."""

from tf_strategies.strategies.central_storage import CentralStorageStrategy
from tf_strategies.strategies.mirrored import RingMirroredStrategy
from tf_strategies.strategies.multi_worker import (
  CollectiveOptions,
  MultiWorkerCollectiveStrategy,
  MultiWorkerRingStrategy,
  RingOptions,
)
from tf_strategies.strategies.parameter_server import ParameterServerStrategy
from tf_strategies.strategies.registry import STRATEGY_NAMES, create_strategy
from tf_strategies.strategies.tpu import TPURingStrategy

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
