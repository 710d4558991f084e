"""Finds the TPUs for a strategy, or raises an error at once.

If there are no TPUs, TensorFlow raises an IndexError or waits: a resolver may ask a
metadata server without a deadline, and in graph mode it tries to connect for a day.
This module asks in a thread, with a deadline.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_strategies import _tf_internal, errors, option_checks
from tf_strategies.cluster import reachability

Resolver = tf.distribute.cluster_resolver.TPUClusterResolver
Metadata = tf.tpu.experimental.TPUSystemMetadata

# A resolver may ask a metadata server without a deadline.
_QUERY_SECONDS = 60.0
_START = (
  "resolver = tf.distribute.cluster_resolver.TPUClusterResolver('local') on a "
  'TPU VM, or with the name or address of the TPU; then '
  'tf.config.experimental_connect_to_cluster(resolver), '
  'tf.tpu.experimental.initialize_tpu_system(resolver) and '
  'TPURingStrategy(resolver)'
)


def find(resolver: Resolver | None) -> tuple[Resolver, Metadata]:
  """Returns the resolver and the metadata of its TPUs.

  If `resolver` is None, the environment names the TPU (`TPU_NAME` or
  `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`).
  """
  option_checks.check(
    resolver is None or isinstance(resolver, Resolver),
    f'resolver={resolver!r}',
    'a tf.distribute.cluster_resolver.TPUClusterResolver, or None',
    f'write {_START}',
  )
  option_checks.check(
    tf.executing_eagerly(),
    'TPURingStrategy inside a tf.Graph or tf.function',
    'eager mode',
    'create the strategy first, then what uses it',
  )
  if resolver is None:
    resolver = _ask('TPUClusterResolver()', _from_environment)
  metadata = _ask(
    f'{type(resolver).__name__}.get_tpu_system_metadata()',
    resolver.get_tpu_system_metadata,
  )
  _check(resolver, metadata)
  return resolver, metadata


def check_device_assignment(device_assignment) -> None:
  """Raises UnsupportedOptionError for replicas of more than one core."""
  cores = getattr(device_assignment, 'num_cores_per_replica', None)
  option_checks.check(
    device_assignment is None or cores == 1,
    f'device_assignment={device_assignment!r} with num_cores_per_replica='
    f'{cores!r}',
    'a tf.tpu.experimental.DeviceAssignment with one core for each replica',
    'build it with computation_shape=[1, 1, 1, 1], or use '
    'tf.distribute.TPUStrategy for model parallelism',
  )


def _from_environment() -> Resolver:
  try:
    return Resolver('')
  except ValueError as e:
    raise errors.UnsupportedOptionError(
      f'resolver=None where the environment names no TPU ({e})',
      'a TPU in TPU_NAME or KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, or a resolver',
      f'write {_START}',
    ) from None


def _ask(what: str, call: Callable[[], Any]) -> Any:
  """Returns `call()`, or raises at a deadline."""

  def ask(_):
    try:
      return call(), None
    except Exception as e:  # Raised again in the caller's thread.
      return None, e

  found = reachability.concurrently(ask, [what], None, _QUERY_SECONDS)[what]
  if found is None:
    raise errors.ClusterConfigError(
      f'Expected an answer of {what} within {_QUERY_SECONDS:g} seconds, got '
      "none. Fix: check the TPU's name, zone and address, and that it runs."
    )
  answer, error = found
  if isinstance(error, errors.Error):
    raise error
  if error is not None:
    raise errors.ClusterConfigError(
      f"{what} failed: {type(error).__name__}: {error}. Fix: check the TPU's name, "
      'zone and address, and that it runs.'
    ) from error
  return answer


def _check(resolver: Resolver, metadata: Metadata) -> None:
  names = [getattr(d, 'name', str(d)) for d in metadata.devices]
  tpus = [name for name in names if 'device:TPU:' in name]
  option_checks.check(
    metadata.num_cores,
    f'a resolver of a TPU without cores (this process sees {names})',
    'a TPU that this process is connected to',
    f"write {_START}; without a TPU, use tfs.create_strategy('ring_mirrored')",
  )
  if len(tpus) != metadata.num_cores:
    raise errors.ClusterConfigError(
      f'Expected one TPU system, got {metadata.num_cores} cores with '
      f'{len(tpus)} names: {tpus}. Fix: connect to one TPU system only.'
    )
  topology = resolver.tpu_hardware_feature
  option_checks.check(
    topology is not None or _tf_internal.initialized_tpu_systems(),
    f'one of {metadata.num_cores} cores that was not initialised',
    'an initialised TPU system',
    'call tf.tpu.experimental.initialize_tpu_system(resolver) before '
    'TPURingStrategy(resolver)',
  )
