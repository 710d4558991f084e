"""Slurm: the tasks of the step that `srun` started.

Only the step's own variables are right for a step that uses a part of a job,
so they come first. A shell with one task, and the batch script itself, which
Slurm numbers as task 0 of all, are no part of a cluster.

Tasks on one host listen at consecutive ports. The first is TFS_PORT, or follows
from the job's number: jobs that share a host then hardly collide, and all are
below the ports that Linux gives to outgoing connections.

Example:

  >>> from tf_strategies.cluster.sources import slurm
  >>> parts = slurm.read({
  ...   'SLURM_PROCID': '2', 'SLURM_NTASKS': '3', 'TFS_PORT': '5000',
  ...   'SLURM_JOB_NODELIST': 'n[1-2]', 'SLURM_TASKS_PER_NODE': '2,1'})
  >>> parts.jobs, parts.task_index
  ({'worker': ['n1:5000', 'n1:5001', 'n2:5000']}, 2)
"""

from collections.abc import Callable, Mapping

from tf_strategies.cluster import checks, tf_config
from tf_strategies.cluster.sources import hostlist, roles

VARIABLE = 'SLURM_PROCID'

_FIRST_PORT = 12_000
_PORTS_OF_A_JOB = 100
_NUM_PORT_RANGES = 200


def read(environ: Mapping[str, str]) -> tf_config.Parts | None:
  """Returns the cluster of the step; None outside of a step of several tasks."""
  if VARIABLE not in environ or 'SLURM_NTASKS' not in environ:
    return None
  if is_batch_script(environ):
    return None
  count_name = _first_of(environ, 'SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS')
  total = checks.integer_variable(environ, count_name, 1, checks.MAX_TASKS)
  place = checks.integer_variable(environ, VARIABLE, 0, total - 1)
  if total == 1:
    return None
  hosts = _expanded(
    environ, hostlist.hosts, 'SLURM_STEP_NODELIST', 'SLURM_JOB_NODELIST'
  )
  tasks = _expanded(
    environ,
    hostlist.numbers,
    'SLURM_STEP_TASKS_PER_NODE',
    'SLURM_TASKS_PER_NODE',
  )
  if len(tasks) != len(hosts) or sum(tasks) != total:
    raise checks.bad_variable(
      'SLURM_TASKS_PER_NODE',
      tasks,
      f'a number for each of {len(hosts)} hosts, in all {total} tasks',
      'start the tasks by srun, which sets hosts and numbers together',
    )
  # Addresses are known if tasks are numbered host by host. With one task on each host,
  # which srun calls cyclic, the order is the same.
  distribution = environ.get('SLURM_DISTRIBUTION', 'block')
  if max(tasks) > 1 and not distribution.startswith(('block', 'unknown')):
    raise checks.bad_variable(
      'SLURM_DISTRIBUTION',
      distribution,
      'block: tasks numbered host by host',
      'pass --distribution=block to srun',
    )
  default = roles.DEFAULT_PORT
  if 'SLURM_JOB_ID' in environ:
    job = checks.integer_variable(environ, 'SLURM_JOB_ID', 0, 10**12)
    default = _FIRST_PORT + job % _NUM_PORT_RANGES * _PORTS_OF_A_JOB
  first = roles.port(environ, default)
  addresses = [
    f'{host}:{first + local}'
    for host, count in zip(hosts, tasks, strict=True)
    for local in range(count)
  ]
  return roles.assign(environ, addresses, place)


def is_batch_script(environ: Mapping[str, str]) -> bool:
  """Returns whether this is the script that `sbatch` runs, and no step of the job."""
  # The steps that it starts inherit ENVIRONMENT, but have a number.
  in_step = 'SLURM_STEP_ID' in environ
  is_batch = environ.get('ENVIRONMENT') == 'BATCH'
  return VARIABLE in environ and is_batch and not in_step


def _first_of(environ: Mapping[str, str], *names: str) -> str:
  """Returns the first variable that is set, or the last one if none is."""
  return next((name for name in names if name in environ), names[-1])


def _expanded(
  environ: Mapping[str, str], parse: Callable[[str], list], *names: str
) -> list:
  """Returns what `parse` makes of the first variable that is set."""
  name = _first_of(environ, *names)
  with checks.reading(name):
    if name not in environ:
      raise checks.bad(
        'its value', checks.MISSING, 'a value', 'start the tasks by srun'
      )
    return parse(environ[name])
