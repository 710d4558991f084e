"""Environment variables that schedulers set, for tests that change them."""

from tf_strategies import cluster

SLURM = {
  'SLURM_JOB_ID': '4242',
  'SLURM_PROCID': '3',
  'SLURM_NTASKS': '7',
  'SLURM_JOB_NODELIST': 'node[001-003],gpu1',
  'SLURM_TASKS_PER_NODE': '2(x3),1',
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
  'TFS_JOB_NAME': 'mnist',
  'TFS_SUBDOMAIN': 'mnist-pods',
  'TFS_NUM_WORKERS': '3',
}


def changed(environ, **changes):
  """Returns `environ` with changes. None removes a variable."""
  merged = {**environ, **changes}
  return {name: value for name, value in merged.items() if value is not None}


def read(environ, **changes):
  """Returns the cluster that an environment with changes describes."""
  return cluster.ClusterConfig.from_env(changed(environ, **changes))
