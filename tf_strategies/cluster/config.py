"""One frozen description of the cluster, checked when it is made."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tf_strategies import option_checks
from tf_strategies.cluster import checks, sources, tf_config


class TrainingTask(NamedTuple):
  """A task that computes gradients: the chief or a worker."""

  type: str
  index: int
  address: str


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class ClusterConfig:
  """The tasks of a job, and which of them this process is.

  Equal descriptions are equal and hash alike; instances can be pickled.

  Args:
    jobs: by type (chief, worker, ps, evaluator) the addresses 'host:port' of the
      tasks.
    task_type: the job of this process. An evaluator need not be in `jobs`.
    task_index: its index in the job.

  Raises:
    ClusterConfigError: a value is malformed, or contradicts another one.

  Example:

    >>> config = ClusterConfig({'worker': ['a:2222', 'b:2222']}, 'worker', 1)
    >>> config.is_chief, config.training_index
    (False, 1)
  """

  jobs: Mapping[str, Sequence[str]]
  task_type: str
  task_index: int

  def __post_init__(self):
    jobs, task_type, task_index = tf_config.checked(
      tf_config.Parts(self.jobs, self.task_type, self.task_index)
    )
    ordered = {job: jobs[job] for job in checks.JOB_TYPES if job in jobs}
    object.__setattr__(self, 'jobs', ordered)
    object.__setattr__(self, 'task_type', task_type)
    object.__setattr__(self, 'task_index', task_index)

  def __hash__(self):
    # A dict has no hash.
    return hash(self.to_tf_config())

  @classmethod
  def from_env(
    cls, environ: Mapping[str, str] = os.environ
  ) -> 'ClusterConfig | None':
    """Reads TF_CONFIG, or else the description of a scheduler.

    TF_CONFIG comes first, then Kubernetes and Slurm
    (`tf_strategies.cluster.sources`). The first that describes a cluster counts.

    Returns:
      The cluster; None for a single process: there is no description, or one of
      a single task, which trains, or TF_CONFIG has neither cluster nor task.
      TF_CONFIG={} starts a single process inside of a scheduler's job.

    Raises:
      ClusterConfigError: the description is malformed; names the variable, its
        value, the expected values and the fix.

    Example:

      >>> ClusterConfig.from_env({}) is None
      True
      >>> ClusterConfig.from_env({'TF_CONFIG': '{"task": {}}'})
      Traceback (most recent call last):
        ...
      tf_strategies.errors.ClusterConfigError: Expected ..., got TF_CONFIG: cluster is missing. ...
      >>> config = ClusterConfig.from_env({
      ...   'SLURM_PROCID': '1', 'SLURM_NTASKS': '2', 'SLURM_JOB_ID': '4242',
      ...   'SLURM_JOB_NODELIST': 'node[07-08]', 'SLURM_TASKS_PER_NODE': '1(x2)'})
      >>> config.address
      'node08:16200'
    """
    option_checks.check_type(
      'environ',
      environ,
      Mapping,
      'a mapping such as os.environ',
      'leave it out',
    )
    if 'TF_CONFIG' in environ:
      described = tf_config.parse(environ['TF_CONFIG'])
      variable, parts = 'TF_CONFIG', tf_config.read(described)
    else:
      variable, parts = sources.first(environ)
    if parts is None:
      return None
    with checks.reading(variable):
      config = cls(*parts)
    count = sum(map(len, config.jobs.values()))
    is_alone = count == 1 and config.training_index == 0
    return None if is_alone else config

  def to_tf_config(self) -> str:
    """Returns this description as the text of a TF_CONFIG: one line of JSON."""
    task = {'type': self.task_type, 'index': self.task_index}
    return json.dumps({'cluster': self.jobs, 'task': task})

  @property
  def address(self) -> str | None:
    """Address of this task; None for an evaluator that the cluster does not list."""
    tasks = self.jobs.get(self.task_type)
    return tasks and tasks[self.task_index]

  @property
  def training_tasks(self) -> tuple[TrainingTask, ...]:
    """The members of a ring in their order: the chief, then the workers."""
    return tuple(
      TrainingTask(job, index, address)
      for job in checks.TRAINING_JOB_TYPES
      for index, address in enumerate(self.jobs.get(job, ()))
    )

  @property
  def training_index(self) -> int | None:
    """Index of this task in `training_tasks`; None for ps and evaluator."""
    for place, task in enumerate(self.training_tasks):
      if task[:2] == (self.task_type, self.task_index):
        return place
    return None

  @property
  def is_chief(self) -> bool:
    """Returns whether this task writes checkpoints and logs: the chief, or worker 0."""
    first = 'chief' if 'chief' in self.jobs else 'worker'
    return (self.task_type, self.task_index) == (first, 0)


def given_or_from_env(cluster: ClusterConfig | None) -> ClusterConfig | None:
  """Returns the cluster that a strategy was given, or the environment's.

  Raises:
    UnsupportedOptionError: it is no `ClusterConfig`.
    ClusterConfigError: the environment is malformed.
  """
  if cluster is None:
    return ClusterConfig.from_env()
  option_checks.check_type(
    'cluster',
    cluster,
    ClusterConfig,
    'a tfs.cluster.ClusterConfig, or None for what TF_CONFIG says',
    'leave it out',
  )
  return cluster
