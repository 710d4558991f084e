"""The strategies, one file each, and `create_strategy`, which takes a name."""

from tf_strategies.strategies.multi_worker import (
  MultiWorkerCollectiveStrategy,
  MultiWorkerRingStrategy,
  RingOptions,
)
from tf_strategies.strategies.parameter_server import ParameterServerStrategy
from tf_strategies.strategies.registry import STRATEGY_NAMES, create_strategy
from tf_strategies.strategies.ring_mirrored import RingMirroredStrategy

__all__ = [
  'STRATEGY_NAMES',
  'MultiWorkerCollectiveStrategy',
  'MultiWorkerRingStrategy',
  'ParameterServerStrategy',
  'RingMirroredStrategy',
  'RingOptions',
  'create_strategy',
]
