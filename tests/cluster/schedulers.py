"""Environments as schedulers set them, for tests that change them."""

import json

from tf_strategies import cluster

VERTEX_POOLS = {
  'workerpool0': ['cmle-training-workerpool0-4c1d-0:2222'],
  'workerpool1': [
    'cmle-training-workerpool1-4c1d-0:2222',
    'cmle-training-workerpool1-4c1d-1:2222',
  ],
}
SLURM = {
  'SLURM_JOB_ID': '4242',
  'SLURM_PROCID': '3',
  'SLURM_NTASKS': '7',
  'SLURM_NODEID': '1',
  'SLURM_LOCALID': '1',
  'SLURM_JOB_NODELIST': 'node[001-003],gpu1',
  'SLURM_TASKS_PER_NODE': '2(x3),1',
}
SAGEMAKER = {
  'SM_HOSTS': '["algo-1", "algo-2", "algo-3"]',
  'SM_CURRENT_HOST': 'algo-2',
  'SM_NETWORK_INTERFACE_NAME': 'eth0',
}
JOBSET = {
  'JOBSET_NAME': 'mnist',
  'REPLICATED_JOB_NAME': 'worker',
  'JOB_INDEX': '0',
  'JOB_COMPLETION_INDEX': '1',
  'TFS_NUM_WORKERS': '2',
  'TFS_NUM_PS': '1',
}
INDEXED_JOB = {
  'JOB_COMPLETION_INDEX': '2',
  'HOSTNAME': 'mnist-2',
  'TFS_SUBDOMAIN': 'mnist-pods',
  'TFS_NUM_WORKERS': '3',
}


def vertex(pools=VERTEX_POOLS, task=('workerpool1', 1)):
  """CLUSTER_SPEC of a task of worker pools."""
  spec = {
    'cluster': pools,
    'environment': 'cloud',
    'task': {'type': task[0], 'index': task[1], 'trial': ''},
    'job': '{"python_module":"","package_uris":[],"job_args":[]}',
  }
  return {'CLUSTER_SPEC': json.dumps(spec)}


def read(environ):
  """The cluster that an environment describes."""
  return cluster.ClusterConfig.from_env(environ)


def changed(environ, **changes):
  """`environ` with changes; None takes a variable away."""
  merged = {**environ, **changes}
  return {name: value for name, value in merged.items() if value is not None}
