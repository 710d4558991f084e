"""Plans the tasks of a job: what each one's environment says. Starts nothing."""

import dataclasses
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tf_strategies import option_checks
from tf_strategies.cluster import checks, command_line, config, sources
from tf_strategies.cluster import job as job_lib

# The loopback address rather than 'localhost', which may also mean ::1.
LOOPBACK = '127.0.0.1'

# Stays the same when a task is restarted: see `checkpoint/ownership.py`.
_RUN_ID = 'TFS_RUN_ID'

# Whatever cluster the launcher itself is part of is not that of its tasks, and
# a second source of the secret would leave open which one counts.
_NOT_INHERITED = ('TF_CONFIG', *sources.VARIABLES, 'TFS_SECRET_FILE')


class HostTasks(NamedTuple):
  """A host's part of a job.

  Attributes:
    host: where its tasks are reached.
    counts: the number of its tasks by type, as `TaskCounts.all_counts`.
    ports: one for each of its tasks, in the order of types. An evaluator uses none.
  """

  host: str
  counts: Mapping[str, int]
  ports: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Place:
  """Which host of a job this is, and where its launchers meet; the fields are flags.

  Raises:
    UnsupportedOptionError: a value out of range, or an address for one host alone.
    ClusterConfigError: the rendezvous is no address.

  Example:

    >>> Place(2, 1, 'host0:29400').node_rank
    1
  """

  nnodes: int = command_line.option(
    'Number of hosts. All run the same command.', 1
  )
  node_rank: int = command_line.option('Number of this host, from 0.', 0)
  rendezvous: str | None = command_line.option(
    'host:port of host 0, where launchers meet. Use any free port.'
  )
  rendezvous_timeout: float = command_line.option(
    'Seconds that launchers wait for the other hosts.', 300.0
  )

  def __post_init__(self):
    option_checks.check(
      self.is_alone == (self.rendezvous is None)
      and not (self.is_alone and self.node_rank),
      f'--nnodes={self.nnodes}, --node_rank={self.node_rank} and '
      f'--rendezvous={self.rendezvous}',
      'an address of host 0 where launchers meet, and only for several hosts',
      'pass --nnodes=2 or more and --rendezvous=host0:29400 on all hosts, or '
      'none of these flags',
    )
    option_checks.check_int('--nnodes', self.nnodes, 1)
    fix = 'count hosts from 0'
    option_checks.check_int(
      '--node_rank', self.node_rank, 0, self.nnodes - 1, fix=fix
    )
    option_checks.check_seconds('--rendezvous_timeout', self.rendezvous_timeout)
    if not self.is_alone:
      with checks.reading('--rendezvous'):
        checks.split_address(self.rendezvous, 'its value')

  @property
  def is_alone(self) -> bool:
    """Returns whether the job has one host."""
    return self.nnodes == 1


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """One task to start."""

  type: str
  index: int
  command: tuple[str, ...]
  # Beyond what the launcher inherited. The secret is in it, and a traceback may
  # show the repr.
  environment: Mapping[str, str] = dataclasses.field(repr=False)
  # Whether the job is over when this task and its like have ended.
  is_training: bool = True
  # The number of its host.
  node: int = 0

  @property
  def name(self) -> str:
    """Name before each line of its output: `worker 0`."""
    return f'{self.type} {self.index}'


def plan_tasks(
  hosts: Sequence[HostTasks], command: Sequence[str], secret: str
) -> list[TaskSpec]:
  """Returns the tasks in the order chief, workers, ps, evaluator, host by host.

  A job of one task gets no TF_CONFIG: it trains in a single process, as a TFJob
  of one does. O(tasks squared), since each TF_CONFIG lists all tasks.

  Args:
    hosts: the hosts.
    command: program and arguments, the same for every task.
    secret: what the tasks prove to each other that they know; hexadecimal.

  Raises:
    UnsupportedOptionError: no task would train.

  Example:

    >>> counts = {'chief': 0, 'worker': 2, 'ps': 0, 'evaluator': 0}
    >>> hosts = [HostTasks('a', counts, [1, 2]), HostTasks('b', counts, [3, 4])]
    >>> [(s.name, s.node) for s in plan_tasks(hosts, ['train'], '5ec7e7')]
    [('worker 0', 0), ('worker 1', 0), ('worker 2', 1), ('worker 3', 1)]
  """
  ports = [iter(host.ports) for host in hosts]
  places: list[tuple[str, int, int]] = []
  total: dict[str, int] = {}
  jobs: dict[str, list[str]] = {}
  for task_type in hosts[0].counts:
    nodes = [k for k, h in enumerate(hosts) for _ in range(h.counts[task_type])]
    total[task_type] = len(nodes)
    for index, k in enumerate(nodes):
      places.append((task_type, index, k))
      if task_type != 'evaluator':
        host = hosts[k].host
        name = f'[{host}]' if ':' in host else host  # An address of IPv6.
        jobs.setdefault(task_type, []).append(f'{name}:{next(ports[k])}')
  job = job_lib.TaskCounts(
    total['worker'], total['ps'], total['chief'] > 0, total['evaluator'] > 0
  )
  # Each host's launcher finds the same, and another launch does not.
  run = hashlib.sha256(f'{secret} {jobs} {places}'.encode()).hexdigest()[:12]
  shared = {'PYTHONUNBUFFERED': '1', 'TFS_SECRET': secret, _RUN_ID: run}
  specs = []
  for task_type, index, k in places:
    environment = dict(shared)
    if len(places) > 1:
      cluster = config.ClusterConfig(jobs, task_type, index)
      environment['TF_CONFIG'] = cluster.to_tf_config()
    is_training = task_type in job.training_types
    specs.append(
      TaskSpec(task_type, index, tuple(command), environment, is_training, k)
    )
  return specs


def full_environment(
  spec: TaskSpec, inherited: Mapping[str, str], restart_count: int
) -> dict[str, str]:
  """Returns a task's environment: the launcher's own, and the task's variables."""
  kept = {k: v for k, v in inherited.items() if k not in _NOT_INHERITED}
  # The run's name outlives this launch: Slurm keeps its number in a requeue.
  run = inherited.get(_RUN_ID) or inherited.get('SLURM_JOB_ID')
  return {
    # TensorFlow reports each processor and library that it has found, in every
    # task. Warnings and errors stay.
    'TF_CPP_MIN_LOG_LEVEL': '1',
    **kept,
    **spec.environment,
    'TFS_RESTART_COUNT': str(restart_count),
    **({_RUN_ID: run} if run else {}),
  }


def describe(spec: TaskSpec) -> str:
  """Returns a task as a shell would start it, with the secret hidden."""
  shown = full_environment(spec, {}, 0)
  shown['TFS_SECRET'] = '<hidden>'
  words = [f'{name}={shlex.quote(value)}' for name, value in shown.items()]
  return f'[{spec.name}] {" ".join(words)} {shlex.join(spec.command)}'


def filtered(specs: Sequence[TaskSpec], text: str) -> set[str]:
  """Returns the names of the tasks that a filter such as `chief,worker:0` names.

  Raises:
    UnsupportedOptionError: it names a task that the job does not have.
  """
  items = {item.strip() for item in text.split(',')}
  by_name = {s.name: {s.type, f'{s.type}:{s.index}'} for s in specs}
  option_checks.check(
    items <= set().union(*by_name.values()),
    f'--rank_filter={text}',
    f'a list of tasks of this job ({", ".join(spec.name for spec in specs)})',
    "write a type or 'type:index', separated by commas, such as "
    '--rank_filter=chief,worker:0',
  )
  return {name for name, meant in by_name.items() if meant & items}
