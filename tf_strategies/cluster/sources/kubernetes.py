"""Kubernetes: the pods of a JobSet, or of an Indexed Job.

Kubernetes gives each pod JOB_COMPLETION_INDEX and, through a headless service
(TFS_SUBDOMAIN), a name that follows from it. How many pods there are it does not
say; the manifests that `python -m tf_strategies.kubernetes` writes do
(TFS_NUM_WORKERS and what else `roles` reads), as they name a JobSet's labels.
An Indexed Job also sets TFS_JOB_NAME. Without TFS_NUM_WORKERS its pods work each
for itself.

The jobs of a JobSet are called chief, worker, ps and evaluator, have one
replica each and as many completions as tasks. The tasks of an Indexed Job are
numbered in that order.

Example:

  >>> from tf_strategies.cluster.sources import kubernetes
  >>> parts = kubernetes.read({
  ...   'JOBSET_NAME': 'mnist', 'REPLICATED_JOB_NAME': 'worker',
  ...   'JOB_COMPLETION_INDEX': '1', 'TFS_NUM_WORKERS': '2'})
  >>> parts.jobs['worker'][1], parts.task_index
  ('mnist-worker-0-1.mnist:2222', 1)
"""

from collections.abc import Mapping

from tf_strategies.cluster import checks, tf_config
from tf_strategies.cluster.sources import roles

VARIABLE = 'JOB_COMPLETION_INDEX'
FURTHER_VARIABLES = ('TFS_SUBDOMAIN', 'TFS_JOB_NAME')

_JOBSET = 'JOBSET_NAME'
_REPLICATED_JOB = 'REPLICATED_JOB_NAME'


def read(environ: Mapping[str, str]) -> tf_config.Parts | None:
  """Returns the cluster of the pods; None for one pod, or if they are not counted."""
  if VARIABLE not in environ or 'TFS_NUM_WORKERS' not in environ:
    return None
  counts = roles.counts(environ)
  total = sum(counts.values())
  if _JOBSET in environ or _REPLICATED_JOB in environ:
    parts = _read_jobset(environ, counts)
  else:
    place = checks.integer_variable(environ, VARIABLE, 0, total - 1)
    subdomain = _name(
      environ, 'TFS_SUBDOMAIN', 'the name of a headless service'
    )
    port = roles.port(environ)
    name = _name(environ, 'TFS_JOB_NAME', 'the name of the Job')
    addresses = [f'{name}-{i}.{subdomain}:{port}' for i in range(total)]
    parts = roles.assign(environ, addresses, place)
  return None if total == 1 else parts


def _read_jobset(
  environ: Mapping[str, str], counts: Mapping[str, int]
) -> tf_config.Parts:
  name = _name(environ, _JOBSET, 'the name of the JobSet')
  own = environ.get(_REPLICATED_JOB, checks.MISSING)
  present = [job for job, count in counts.items() if count]
  if own not in present:
    raise checks.bad_variable(
      _REPLICATED_JOB,
      own,
      f'a job that there are tasks of ({", ".join(present)})',
      'name the replicated jobs chief, worker, ps and evaluator, and set '
      'TFS_NUM_WORKERS and TFS_NUM_PS to the numbers of their pods',
    )
  # Pods of several replicas would be numbered twice, which nothing orders.
  checks.integer_variable(environ, 'JOB_INDEX', 0, 0, 0)
  index = checks.integer_variable(environ, VARIABLE, 0, counts[own] - 1)
  subdomain = environ.get('TFS_SUBDOMAIN', name)
  port = roles.port(environ)
  jobs = {
    job: [f'{name}-{job}-0-{i}.{subdomain}:{port}' for i in range(counts[job])]
    for job in present
  }
  return tf_config.Parts(jobs, own, index)


def _name(environ: Mapping[str, str], variable: str, allowed: str) -> str:
  if environ.get(variable):
    return environ[variable]
  raise checks.bad_variable(
    variable,
    environ.get(variable, checks.MISSING),
    allowed,
    'set it, as python -m tf_strategies.kubernetes does, or unset '
    f'{VARIABLE} to train in a single process',
  )
