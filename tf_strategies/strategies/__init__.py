"""The strategies, one file each, and `create_strategy`, which takes a name."""

from tf_strategies.strategies.ring_mirrored import RingMirroredStrategy

__all__ = ['RingMirroredStrategy']
