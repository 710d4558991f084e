"""Replicas on the devices of one host, each with a copy of the variables."""

from tf_strategies.strategies.mirrored.strategy import RingMirroredStrategy

__all__ = ['RingMirroredStrategy']
