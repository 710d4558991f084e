"""Connecting the coordinator to the tasks of its cluster."""

from __future__ import annotations

import os
from collections.abc import Callable

import tensorflow as tf

from tf_strategies import _tf_internal, errors
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import reachability

_WAY_OUT = (
  "list them in TF_CONFIG's cluster, as python -m tf_strategies.launch "
  '--num_workers=2 --num_ps=2 --chief does'
)


def checked_cluster(
  cluster: config_lib.ClusterConfig | None,
) -> config_lib.ClusterConfig:
  """The cluster that this process coordinates.

  Args:
    cluster: None means TF_CONFIG.

  Raises:
    ClusterConfigError: there is none, it has no parameter server or no worker,
      or this process is not its coordinator.
  """
  if cluster is None:
    cluster = config_lib.ClusterConfig.from_env()
  if cluster is None:
    raise errors.ClusterConfigError(
      'ParameterServerStrategy without a cluster: TF_CONFIG is not set. Expected '
      f'a cluster with worker and ps tasks. Fix: {_WAY_OUT}, or train on '
      "one device: tfs.create_strategy('one_device')."
    )
  for job in ('ps', 'worker'):
    tasks = cluster.jobs.get(job)
    if not tasks:
      raise errors.ClusterConfigError(
        f'the cluster has no {job} task. Expected at least one. Fix: '
        f'{_WAY_OUT}.'
      )
    if list(tasks) != list(range(len(tasks))):
      raise errors.ClusterConfigError(
        f'the cluster has the {job} tasks {list(tasks)}. Expected indices '
        'from 0 without gaps: the coordinator must know every task. Fix: '
        'list all of them for the chief.'
      )
  if cluster.task_type != 'chief':
    raise errors.ClusterConfigError(
      f'task {cluster.task_type!r} {cluster.task_index} cannot coordinate. '
      'Expected the chief alone. Fix: start the program through '
      'tfs.cluster.run_task(train), which makes ps and worker tasks serve.'
    )
  return cluster


def check_partitioner(partitioner: Callable | None) -> None:
  """Refuses what cannot be asked how to cut a variable."""
  if partitioner is not None and not callable(partitioner):
    raise errors.UnsupportedOptionError(
      f'variable_partitioner={partitioner!r}',
      'a function of shape and dtype',
      'use one of tf.distribute.experimental.partitioners',
    )


def resolver(
  cluster: config_lib.ClusterConfig,
) -> tf.distribute.cluster_resolver.ClusterResolver:
  """Describes the cluster to TensorFlow, without the evaluator."""
  jobs = {
    job: list(cluster.jobs[job].values())
    for job in ('chief', 'worker', 'ps')
    if job in cluster.jobs
  }
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(jobs), task_type='chief', task_id=0, rpc_layer='grpc'
  )


def connect(strategy, start_timeout: float) -> None:
  """Connects TensorFlow's runtime to the cluster, once a process.

  A process that connected to the same tasks before keeps that connection: a
  second one would cut off the variables of the first.

  Args:
    strategy: a `ParameterServerStrategy`.
    start_timeout: seconds to wait for the tasks.

  Raises:
    RendezvousError: tasks that do not answer by then, by name.
  """
  # Without it a call to a dead task waits for it to come back.
  os.environ.setdefault('GRPC_FAIL_FAST', 'use_caller')
  spec = strategy._cluster_resolver.cluster_spec()  # pylint: disable=protected-access
  connected = _tf_internal.connected_cluster()
  if connected is not None and _has_tasks(connected.cluster, spec):
    strategy._num_workers = spec.num_tasks('worker')  # pylint: disable=protected-access
    strategy._num_ps = spec.num_tasks('ps')  # pylint: disable=protected-access
    return
  tasks = {
    f'{job} {index}': address
    for job in ('ps', 'worker')
    for index, address in strategy.cluster.jobs[job].items()
  }
  reachability.wait_for_tasks(tasks, start_timeout, 'to train')
  strategy._connect_to_cluster(coordinator_name='chief')  # pylint: disable=protected-access


def _has_tasks(cluster_def, spec) -> bool:
  """Whether a cluster has the same servers and workers."""
  found = {job.name: dict(job.tasks) for job in cluster_def.job}
  return all(
    found.get(job) == dict(enumerate(spec.job_tasks(job)))
    for job in ('ps', 'worker')
  )
