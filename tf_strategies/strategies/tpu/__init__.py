"""Training on TPUs."""

from tf_strategies.strategies.tpu.strategy import TPURingStrategy

__all__ = ['TPURingStrategy']
