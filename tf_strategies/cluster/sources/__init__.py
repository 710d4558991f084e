"""Descriptions of a cluster: one module a scheduler (examples/CLUSTERS.md).

Each has `read(environ)`, which returns the description, or None where the
scheduler does not run this process as one task of several. A malformed
description raises `ClusterConfigError`: as a single process each task would
silently train a model of its own.

Example:

  >>> from tf_strategies.cluster import sources
  >>> environ = {
  ...   'SLURM_PROCID': '1', 'SLURM_NTASKS': '2', 'TFS_PORT': '5000',
  ...   'SLURM_JOB_NODELIST': 'n[1-2]', 'SLURM_TASKS_PER_NODE': '1(x2)'}
  >>> variable, parts = sources.first(environ)
  >>> variable, parts.jobs
  ('SLURM_PROCID', {'worker': ['n1:5000', 'n2:5000']})
"""

from collections.abc import Mapping

from tf_strategies.cluster import checks, tf_config
from tf_strategies.cluster.sources import kubernetes, roles, slurm

# In the order in which they count. Kubernetes is asked for by TFS_NUM_WORKERS.
_SOURCES = (kubernetes, slurm)

# Without them no source finds anything: for processes that start others.
VARIABLES = (
  *(source.VARIABLE for source in _SOURCES),
  *kubernetes.FURTHER_VARIABLES,
  *roles.VARIABLES,
)


def first(environ: Mapping[str, str]) -> tuple[str, tf_config.Parts | None]:
  """Returns the first scheduler's description, and the variable that names it.

  The description is None if no scheduler describes the job.

  Raises:
    ClusterConfigError: it is malformed; or TFS_NUM_WORKERS or TFS_NUM_PS ask
      for several tasks, and no scheduler numbers this one.
  """
  for source in _SOURCES:
    with checks.reading(source.VARIABLE):
      parts = source.read(environ)
    if parts is not None:
      return source.VARIABLE, parts
  # What a batch script exports is for the steps that it starts.
  if not slurm.is_batch_script(environ):
    roles.check_alone(environ)
  return '', None
