"""Creates a strategy by name, so that one flag can compare all of them."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf
from absl import logging

from tf_strategies import cluster as cluster_lib
from tf_strategies import cross_device, option_checks
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.strategies.central_storage.strategy import (
  CentralStorageStrategy,
)
from tf_strategies.strategies.mirrored import devices as devices_lib
from tf_strategies.strategies.mirrored import strategy as mirrored_strategy
from tf_strategies.strategies.mirrored.strategy import RingMirroredStrategy
from tf_strategies.strategies.multi_worker.collective_strategy import (
  MultiWorkerCollectiveStrategy,
)
from tf_strategies.strategies.multi_worker.ring_strategy import (
  MultiWorkerRingStrategy,
)
from tf_strategies.strategies.parameter_server import ParameterServerStrategy
from tf_strategies.strategies.parameter_server import options as options_lib
from tf_strategies.strategies.tpu.strategy import TPURingStrategy


def _one_device(devices=None) -> tf.distribute.Strategy:
  """Returns TensorFlow's own strategy on the first of `devices`."""
  workers_lib.check_alone('one_device')
  return tf.distribute.OneDeviceStrategy(
    devices_lib.resolve_devices(devices)[0]
  )


def _mirrored(devices=None, cross_device_ops=None) -> tf.distribute.Strategy:
  """Returns TensorFlow's own mirrored strategy, for comparison."""
  workers_lib.check_alone('mirrored')
  mirrored_strategy.check_cross_device_ops(cross_device_ops)
  strategy = tf.distribute.MirroredStrategy(
    list(devices_lib.resolve_devices(devices)), cross_device_ops
  )
  if isinstance(cross_device_ops, cross_device.ScheduledAllReduce):
    strategy.communication_report = cross_device_ops.report
  return strategy


def _parameter_server(cluster=None, **options) -> tf.distribute.Strategy:
  """Returns our strategy. Without a cluster, it trains on one device."""
  # Wrong options must raise at once, before the cluster is ready.
  known = inspect.signature(ParameterServerStrategy).parameters
  option_checks.check_names('ParameterServerStrategy', options, known)
  options_lib.ParameterServerOptions(**options)
  if cluster is None and cluster_lib.ClusterConfig.from_env() is None:
    logging.info('No TF_CONFIG: parameter_server trains on one device.')
    return _one_device()
  return ParameterServerStrategy(cluster, **options)


def _central_storage(devices=None, **options) -> tf.distribute.Strategy:
  """Returns our strategy. `devices` are the compute devices."""
  option_checks.check(
    devices is None or 'compute_devices' not in options,
    f'devices={devices!r} beside compute_devices',
    'one of the two',
    'leave one out: they are two names of the same option',
  )
  return CentralStorageStrategy(
    options.pop('compute_devices', devices), **options
  )


def _tpu_ring(devices=None, **options) -> tf.distribute.Strategy:
  """Returns our strategy on all cores of a TPU."""
  option_checks.check(
    devices is None,
    f'devices={devices!r}',
    "devices=None with strategy='tpu_ring'",
    'pass resolver, and device_assignment for some of its cores. The '
    'replicas are the cores of a TPU',
  )
  return TPURingStrategy(**options)


_FACTORIES = {
  'one_device': _one_device,
  'mirrored': _mirrored,
  'ring_mirrored': RingMirroredStrategy,
  'multi_worker_ring': MultiWorkerRingStrategy,
  'multi_worker_collective': MultiWorkerCollectiveStrategy,
  'parameter_server': _parameter_server,
  'central_storage': _central_storage,
  'tpu_ring': _tpu_ring,
}


def create_strategy(name: str, **options: Any) -> tf.distribute.Strategy:
  """Returns the strategy called `name`.

  Args:
    name: 'one_device', 'mirrored' (both TensorFlow's), 'ring_mirrored',
      'central_storage', 'multi_worker_ring', 'multi_worker_collective',
      'parameter_server' or 'tpu_ring'.
    **options: the arguments of that strategy, such as `devices`.

  Raises:
    UnsupportedOptionError: another name, or an option that the strategy does not
      have.

  Example:

    >>> create_strategy('ring_mirrored', devices=['CPU:0']).num_replicas_in_sync
    1
  """
  option_checks.check_choice(
    'strategy', name, sorted(_FACTORIES), 'check the spelling'
  )
  factory = _FACTORIES[name]
  parameters = inspect.signature(factory).parameters.values()
  # Otherwise the strategy gets the options and checks them.
  if all(p.kind is not p.VAR_KEYWORD for p in parameters):
    known = [p.name for p in parameters]
    option_checks.check_names(f'strategy={name!r}', options, known, of=factory)
  return factory(**options)
