"""How the workers of a multi-worker strategy start: together, and alike."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors, process_group
from tf_strategies import cluster as cluster_lib

# No cluster at all: a group of one, at any free port.
_ALONE = {0: '127.0.0.1:0'}


def form_group(
  cluster: cluster_lib.ClusterConfig | None, options
) -> tuple[process_group.ProcessGroup, process_group.Rendezvous | None]:
  """Waits for the other workers and links up with them.

  Args:
    cluster: who takes part; None reads TF_CONFIG, and without one this process
      is alone.
    options: a `RingOptions`.

  Returns:
    The group, and what listens for workers that come later.

  Raises:
    ClusterConfigError: the cluster has no part for this process.
    RendezvousError: some did not come by the deadline.
  """
  if options.link == 'mpi':
    return process_group.form_mpi_group(options.group), None
  if cluster is None:
    cluster = cluster_lib.ClusterConfig.from_env()
  group_options = options.group or process_group.GroupOptions.from_env()
  rendezvous = open_rendezvous(cluster, group_options)
  try:
    return rendezvous.form(), rendezvous
  except BaseException:
    rendezvous.close()
    raise


def open_rendezvous(
  cluster: cluster_lib.ClusterConfig | None,
  options: process_group.GroupOptions,
) -> process_group.Rendezvous:
  """Listens at this task's address of the cluster, for the others to come."""
  if cluster is None:
    return process_group.Rendezvous(_ALONE, 0, options)
  index = cluster.training_index
  if index is None:
    raise errors.ClusterConfigError(
      f'task {cluster.task_type!r} {cluster.task_index} does not train. Allowed '
      'are chief and worker tasks of the cluster. Way out: run the evaluator or '
      'the parameter server there instead of MultiWorkerRingStrategy.'
    )
  addresses = {i: t.address for i, t in enumerate(cluster.training_tasks)}
  return process_group.Rendezvous(addresses, index, options)


def agree(
  group: process_group.ProcessGroup, devices: Sequence[str], options
) -> None:
  """Makes sure that all workers will build the same, and shuffle the same.

  Raises:
    CollectiveMismatchError: workers with other devices or options.
  """
  group.agree(
    {
      'devices of a worker': len(devices),
      'bucket_bytes': options.bucket_bytes,
      'compression': options.compression,
    },
    what='the set-up of MultiWorkerRingStrategy',
  )
  seed = _tf_internal.global_seed()
  proposal = np.array([secrets.randbits(31) if seed is None else seed])
  chosen = int(
    group.broadcast(proposal.astype(np.int64), 0, name='random_seed')[0]
  )
  if seed is None:
    # Unseeded, each worker would shuffle in another order and some elements
    # would be taken twice, some never.
    tf.random.set_seed(chosen)
  elif seed != chosen:
    logging.warning(
      'The random seed of this worker is %d, the chief has %d. What is shuffled '
      'must be shuffled alike: set the same seed on every worker.',
      seed,
      chosen,
    )
