"""Everything that knows Keras: the optimizer wrapper and what to check."""

from tf_strategies.keras.chief_only import ChiefOnly
from tf_strategies.keras.distributed_optimizer import DistributedOptimizer

__all__ = ['ChiefOnly', 'DistributedOptimizer']
