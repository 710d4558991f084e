"""Defines the common part of both multi-worker strategies."""

import secrets
from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors, process_group
from tf_strategies import cluster as cluster_lib
from tf_strategies.strategies.mirrored import devices as devices_lib
from tf_strategies.strategies.mirrored import strategy as mirrored_strategy
from tf_strategies.strategies.multi_worker import extended as extended_lib

# The random seed that a strategy gave to this process, not the user.
_agreed: dict[str, int] = {}


class MultiWorkerStrategy(
  mirrored_strategy.ExactStrategy, tf.distribute.Strategy
):
  """Replicas on several workers, each of which runs the same program.

  `cluster_resolver` describes the cluster and this task to TensorFlow. Without a
  cluster it is empty, and has no task. A process group's members are workers, numbered
  by rank.
  """

  extended_class = extended_lib.MultiWorkerExtended

  @classmethod
  def place_in(
    cls, cluster: cluster_lib.ClusterConfig | None
  ) -> tuple[int, tuple[str, ...]]:
    """Returns this process's rank in `cluster`, and the addresses of all trainers.

    Raises:
      ClusterConfigError: if the cluster has no part for this process.
    """
    if cluster is None:
      # Without a cluster, this process is alone and may use any free port.
      return 0, ('127.0.0.1:0',)
    index = cluster.training_index
    if index is None:
      raise errors.ClusterConfigError(
        'Expected a chief or worker task of the cluster, got '
        f'{cluster.task_type!r} {cluster.task_index}, which does not train. '
        'Fix: run the evaluator or the parameter server there instead of '
        f'{cls.__name__}.'
      )
    return index, tuple(task.address for task in cluster.training_tasks)

  def _set_up(
    self,
    devices,
    cross_device_ops,
    communicator,
    setup,
    resolver,
  ):
    """Initializes the strategy, if the other workers have the same `setup`.

    Args:
      devices: devices of this worker.
      cross_device_ops: all-reduce between these devices.
      communicator: link to the other workers.
      setup: settings that must be equal on all workers, by name.
      resolver: describes the cluster to TensorFlow.

    Raises:
      CollectiveMismatchError: if workers have other devices or options.
    """
    extended = self.extended_class(
      self, devices, cross_device_ops, communicator
    )
    tf.distribute.Strategy.__init__(self, extended)
    extended._cluster_resolver = resolver  # Read by `cluster_resolver`, too.
    own, proposal = proposed_seed()
    setup = {'devices of a worker': len(devices), **setup}
    setups, seeds = zip(
      *communicator.exchange('set-up', [setup, proposal]), strict=True
    )
    communicator.check_same(
      setups,
      f'the set-up of {type(self).__name__}',
      'start all workers with the same program and settings',
    )
    take_seed(own, seeds[0])

  @property
  def rank(self) -> int:
    """Rank of this worker among the workers. The chief has rank 0."""
    return self.extended.communicator.rank

  @property
  def num_workers(self) -> int:
    """Number of workers that train now."""
    return self.extended.communicator.world_size

  @property
  def is_chief(self) -> bool:
    """Returns whether this worker writes checkpoints and logs."""
    return self.rank == 0

  def communication_report(self) -> dict[str, object]:
    """Returns the communication so far: `calls` by kind, the link, the workers."""
    return self.extended.communicator.report()

  def close(self) -> None:
    """Leaves the other workers. Their later collectives fail."""
    self.extended.communicator.close()


def resolve_devices(devices) -> tuple[str, ...]:
  """Returns full names of a worker's devices; by default all GPUs, or the first CPU."""
  if devices is None:
    devices = tf.config.list_logical_devices('GPU') or ['CPU:0']
  return devices_lib.resolve_devices(devices)


def resolver_of(
  cluster: cluster_lib.ClusterConfig | None,
) -> tf.distribute.cluster_resolver.ClusterResolver:
  """Describes a cluster to TensorFlow. None means a single process."""
  if cluster is None:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
      tf.train.ClusterSpec({})
    )
  return _resolver(cluster.jobs, cluster.task_type, cluster.task_index)


def resolver_of_group(
  group: process_group.ProcessGroup,
) -> tf.distribute.cluster_resolver.ClusterResolver:
  """Describes the members of a process group as workers, numbered by rank."""
  return resolver_of_workers([m.address for m in group.members], group.rank)


def resolver_of_workers(
  addresses: Sequence[str], rank: int
) -> tf.distribute.cluster_resolver.ClusterResolver:
  """Describes workers to TensorFlow, numbered by rank."""
  return _resolver({'worker': addresses}, 'worker', rank)


def _resolver(jobs, task_type, task_index):
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(dict(jobs)),
    master=jobs[task_type][task_index],
    task_type=task_type,
    task_id=task_index,
    rpc_layer='grpc',
  )


def proposed_seed() -> tuple[int | None, int]:
  """Returns the random seed of the user, if any, and the seed to propose to others."""
  seed = _tf_internal.global_seed()
  if seed == _agreed.get('seed'):
    # An earlier strategy chose this seed. A worker that joined later does not
    # have it.
    return None, secrets.randbits(31) if seed is None else seed
  return seed, seed


def take_seed(own: int | None, chosen: int) -> None:
  """Makes all workers shuffle alike, with the seed that was chosen for all."""
  if own is None:
    # Without a common seed, each worker would shuffle differently. Some
    # elements would be used twice, some never.
    tf.random.set_seed(chosen)
    _agreed['seed'] = chosen
  elif own != chosen:
    logging.warning(
      'The random seed of this worker is %d, the chief has %d. What is '
      'shuffled must be shuffled alike: set the same seed on every worker.',
      own,
      chosen,
    )
