"""Plans the tasks of a job: what each one's environment says. Starts nothing."""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence

from tf_strategies import errors
from tf_strategies.cluster import config, exit_codes, launcher_note, sources
from tf_strategies.cluster import job as job_lib

_FILTERED = re.compile(r'([a-z]+)(?::([0-9]{1,9})(?:-([0-9]{1,9}))?)?')
# The loopback address rather than 'localhost', which may also mean ::1.
LOOPBACK = '127.0.0.1'

_LOG_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'
# Stays the same when a task is restarted: see `checkpoint/ownership.py`.
_RUN_ID = 'TFS_RUN_ID'

# Whatever cluster the launcher itself is part of is not that of its tasks, and
# a second source of the secret would leave open which one counts.
NOT_INHERITED = (
  'TF_CONFIG',
  *sources.VARIABLES,
  'TFS_SECRET',
  'TFS_SECRET_FILE',
  'TFS_RESTART_COUNT',
  launcher_note.VARIABLE,
)


@dataclasses.dataclass(frozen=True)
class Node:
  """A host's part of a job.

  Attributes:
    host: where its tasks are reached.
    counts: the number of its tasks by type, as `job.Job.all_counts`.
    ports: one for each of its tasks but an evaluator, in the order of types.
  """

  host: str
  counts: Mapping[str, int]
  ports: Sequence[int]


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
    """As it is called in the output: `worker 0`."""
    return f'{self.type} {self.index}'


def plan_tasks(
  nodes: Sequence[Node], command: Sequence[str], secret: str
) -> list[TaskSpec]:
  """The tasks in the order chief, workers, ps, evaluator, host by host.

  A job of one task gets no TF_CONFIG: it trains in a single process, as a TFJob
  of one does. O(tasks squared), since each TF_CONFIG lists all tasks.

  Args:
    nodes: the hosts.
    command: program and arguments, the same for every task.
    secret: what the tasks prove to each other that they know; hexadecimal.

  Raises:
    ValueError: a host's ports are too few or too many.
    UnsupportedOptionError: no task would train.

  Example:

    >>> counts = {'chief': 0, 'worker': 2, 'ps': 0, 'evaluator': 0}
    >>> nodes = [Node('a', counts, [1, 2]), Node('b', counts, [3, 4])]
    >>> [(s.name, s.node) for s in plan_tasks(nodes, ['train'], '5ec7e7')]
    [('worker 0', 0), ('worker 1', 0), ('worker 2', 1), ('worker 3', 1)]
  """
  total = {t: sum(n.counts[t] for n in nodes) for t in nodes[0].counts}
  job = job_lib.Job(
    *(total['worker'], total['ps'], total['chief'] > 0, total['evaluator'] > 0)
  )
  for node in nodes:
    wanted = sum(node.counts.values()) - node.counts['evaluator']
    if len(node.ports) != wanted:
      raise ValueError(
        f'ports ({len(node.ports)}) must be as many as the addresses of {job}.'
      )
  ports = [iter(node.ports) for node in nodes]
  names: list[tuple[str, int, int]] = []
  jobs: dict[str, dict[int, str]] = {}
  for task_type in job.all_counts:
    places = [
      k for k, n in enumerate(nodes) for _ in range(n.counts[task_type])
    ]
    for index, place in enumerate(places):
      names.append((task_type, index, place))
      if task_type != 'evaluator':
        address = f'{_bracketed(nodes[place].host)}:{next(ports[place])}'
        jobs.setdefault(task_type, {})[index] = address
  specs = []
  # What each host's launcher finds alike, and another launch does not.
  run = hashlib.sha256(f'{secret} {jobs} {names}'.encode()).hexdigest()[:12]
  for task_type, index, place in names:
    environment = {
      'PYTHONUNBUFFERED': '1',
      'TFS_SECRET': secret,
      _RUN_ID: run,
    }
    if len(names) > 1:
      cluster = config.ClusterConfig(jobs, task_type, index)
      environment['TF_CONFIG'] = cluster.to_tf_config()
    is_training = task_type in job.training_types
    specs.append(
      TaskSpec(
        task_type, index, tuple(command), environment, is_training, place
      )
    )
  return specs


def _bracketed(host: str) -> str:
  return f'[{host}]' if ':' in host else host


def full_environment(
  spec: TaskSpec, inherited: Mapping[str, str], restart_count: int
) -> dict[str, str]:
  """All of a task's environment: the launcher's own, and what is the task's."""
  kept = {k: v for k, v in inherited.items() if k not in NOT_INHERITED}
  # A server that someone else ended has not done its work. What it ends with
  # once the launcher ends the job, nobody asks.
  name = exit_codes.TERMINATED_VARIABLE
  # What names the run outlives this launch: Slurm keeps its number in a requeue.
  named = inherited.get(_RUN_ID) or inherited.get('SLURM_JOB_ID')
  return {
    **kept,
    **spec.environment,
    # TensorFlow tells of each processor and library that it has found, in
    # every task; warnings and errors stay.
    _LOG_LEVEL: log_level(kept),
    name: kept.get(name, str(exit_codes.RESTARTABLE_EXIT_CODE)),
    'TFS_RESTART_COUNT': str(restart_count),
    **({_RUN_ID: named} if named else {}),
  }


def log_level(environ: Mapping[str, str]) -> str:
  """TF_CPP_MIN_LOG_LEVEL of tasks: warnings and errors, unless told otherwise."""
  return environ.get(_LOG_LEVEL, '1')


def describe(spec: TaskSpec) -> str:
  """A task as a shell would start it, with the secret hidden."""
  shown = full_environment(spec, {}, 0)
  shown['TFS_SECRET'] = '<hidden>'
  words = [f'{name}={shlex.quote(value)}' for name, value in shown.items()]
  return f'[{spec.name}] {" ".join(words)} {shlex.join(spec.command)}'


def parse_filter(text: str, counts: Mapping[str, int]) -> frozenset[str]:
  """The names of the tasks that a filter such as `chief,worker:0-1` names.

  Raises:
    UnsupportedOptionError: it is no such list, or names a task that the job
      does not have.
  """
  names: set[str] = set()
  for item in text.split(','):
    match = _FILTERED.fullmatch(item.strip())
    task_type, first, last = match.groups() if match else ('', None, None)
    count = counts.get(task_type, 0)
    start = int(first or 0)
    # Without an index: all tasks of the type.
    end = int(last or first) if first else count - 1
    if not 0 <= start <= end < count:
      present = ', '.join(
        task_type if count == 1 else f'{task_type}:0-{count - 1}'
        for task_type, count in counts.items()
        if count
      )
      raise errors.UnsupportedOptionError(
        f'--rank_filter={text}',
        f'a list of tasks of this job ({present})',
        "write a type, 'type:index' or 'type:first-last', separated by commas, "
        'such as --rank_filter=chief,worker:0-1',
      )
    names |= {f'{task_type} {index}' for index in range(start, end + 1)}
  return frozenset(names)
