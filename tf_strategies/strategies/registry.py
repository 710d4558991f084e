"""Maps a flag's name to a strategy, so that one flag compares all of them."""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tf_strategies import cluster as cluster_lib
from tf_strategies import errors
from tf_strategies.strategies import devices as devices_lib
from tf_strategies.strategies.multi_worker import (
  MultiWorkerCollectiveStrategy,
  MultiWorkerRingStrategy,
)
from tf_strategies.strategies.parameter_server import ParameterServerStrategy
from tf_strategies.strategies.ring_mirrored import RingMirroredStrategy


def _one_device(devices=None) -> tf.distribute.Strategy:
  """TensorFlow's own strategy on the first of `devices`."""
  return tf.distribute.OneDeviceStrategy(
    devices_lib.resolve_devices(devices)[0]
  )


def _mirrored(devices=None, cross_device_ops=None) -> tf.distribute.Strategy:
  """TensorFlow's own mirrored strategy, for comparison."""
  return tf.distribute.MirroredStrategy(
    list(devices_lib.resolve_devices(devices)), cross_device_ops
  )


def _parameter_server(**options) -> tf.distribute.Strategy:
  """Ours; without a cluster, the same program trains on one device."""
  given = options.get('cluster')
  if given is None and cluster_lib.ClusterConfig.from_env() is None:
    logging.info('No TF_CONFIG: parameter_server trains on one device.')
    return _one_device()
  return ParameterServerStrategy(**options)


_FACTORIES = {
  'one_device': _one_device,
  'mirrored': _mirrored,
  'ring_mirrored': RingMirroredStrategy,
  'multi_worker_ring': MultiWorkerRingStrategy,
  'multi_worker_collective': MultiWorkerCollectiveStrategy,
  'parameter_server': _parameter_server,
}

# Named in the design and not built yet: a flag that asks for one is told so.
_PLANNED = (
  'central_storage',
  'tpu_ring',
)

STRATEGY_NAMES = (*_FACTORIES, *_PLANNED)


def create_strategy(name: str, **options) -> tf.distribute.Strategy:
  """Returns the strategy called `name`.

  Args:
    name: one of `STRATEGY_NAMES`.
    **options: arguments of that strategy, such as `devices` or
      `cross_device_ops`.

  Raises:
    UnsupportedOptionError: an unknown name, one that is not built yet, or an
      option that the strategy does not have.

  Example:

    >>> create_strategy('ring_mirrored', devices=['CPU:0']).num_replicas_in_sync
    1
  """
  available = f'one of {sorted(_FACTORIES)}'
  if name in _PLANNED:
    raise errors.UnsupportedOptionError(
      f'strategy={name!r} (planned, not built yet)',
      available,
      "use 'ring_mirrored' for the devices of one host",
    )
  if name not in _FACTORIES:
    raise errors.UnsupportedOptionError(
      f'strategy={name!r}', available, 'check the spelling'
    )
  try:
    return _FACTORIES[name](**options)
  except TypeError as e:
    if 'unexpected keyword argument' not in str(e):
      raise
    raise errors.UnsupportedOptionError(
      f'strategy={name!r} with options {sorted(options)}',
      'devices, except for parameter_server; cross_device_ops, except for '
      'one_device; cluster and options for multi_worker_ring; cluster and the '
      'options of ParameterServerStrategy for parameter_server',
      'remove the other options',
    ) from None
