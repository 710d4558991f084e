"""What a manifest is made of, checked before anything is written.

Example:

  >>> from tf_strategies.kubernetes import options
  >>> options.Options(image='mnist:1', num_workers=2, num_ps=1).all_counts
  {'chief': 1, 'worker': 2, 'ps': 1, 'evaluator': 0}
"""

import dataclasses
import re

from tf_strategies import errors
from tf_strategies.cluster import checks
from tf_strategies.cluster import job as job_lib

RESTART_POLICIES = ('ExitCode', 'OnFailure', 'Always', 'Never')

_DNS_LABEL = re.compile(r'[a-z]([-a-z0-9]*[a-z0-9])?')
_LONGEST_LABEL = 63
_DNS_SUBDOMAIN = re.compile(
  r'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*'
)
_LONGEST_SUBDOMAIN = 253
# What Kubernetes adds to a pod's name.
_RANDOM_ENDING = '-abcde'


@dataclasses.dataclass(frozen=True)
class Options:
  """A job on Kubernetes.

  Args:
    image: of the container that every task runs in.
    name: of the job.
    num_workers: tasks of type worker.
    num_ps: parameter servers; with any there is a chief, which trains.
    chief: whether there is a chief beside the workers.
    evaluator: whether there is an evaluator.
    gpus_per_worker: GPUs for each task that computes gradients.
    checkpoint_pvc: a PersistentVolumeClaim that the tasks that train and the
      evaluator mount; with parameter servers the chief alone trains.
    checkpoint_path: where they mount it.
    secret_name: a Secret that exists, with the key `secret`; None makes one.
    namespace: of the job; None leaves it to kubectl.
    max_restarts: how often each task is started again, on average.
    restart_policy: a TFJob's, for each task; a JobSet's is always like ExitCode.
    grace_period: seconds that a pod has between SIGTERM and SIGKILL.

  Raises:
    UnsupportedOptionError: Kubernetes or the job's controller would refuse it,
      or take it for something else.
  """

  image: str
  name: str = 'tf-strategies'
  num_workers: int = 1
  num_ps: int = 0
  chief: bool = False
  evaluator: bool = False
  gpus_per_worker: int = 0
  checkpoint_pvc: str | None = None
  checkpoint_path: str = '/checkpoints'
  secret_name: str | None = None
  namespace: str | None = None
  max_restarts: int = 3
  restart_policy: str = 'ExitCode'
  grace_period: int = 30

  def __post_init__(self):
    def check(is_right: bool, received: str, expected: str, fix: str) -> None:
      if not is_right:
        raise errors.UnsupportedOptionError(received, expected, fix)

    check(
      self.image and not any(c.isspace() for c in self.image),
      f'--image={self.image!r}',
      'the name of an image, without spaces',
      'pass --image=registry/mnist:1',
    )
    for flag in ('gpus_per_worker', 'max_restarts', 'grace_period'):
      check(
        getattr(self, flag) >= 0,
        f'--{flag}={getattr(self, flag)}',
        'an integer of at least 0',
        f'pass --{flag}=1, or leave it out',
      )
    total = sum(self.all_counts.values())
    check(
      total <= checks.MAX_TASKS,
      f'a job of {total} tasks',
      f'at most {checks.MAX_TASKS}',
      'pass smaller --num_workers and --num_ps',
    )
    check(
      self.restart_policy in RESTART_POLICIES,
      f'--restart_policy={self.restart_policy}',
      f'one of {", ".join(RESTART_POLICIES)}',
      'pass --restart_policy=ExitCode, which fits the exit codes of '
      'tf_strategies.cluster.exit_codes',
    )
    check(
      self.checkpoint_path.startswith('/'),
      f'--checkpoint_path={self.checkpoint_path}',
      'an absolute path',
      'pass --checkpoint_path=/checkpoints',
    )
    check_job_name(self.name)
    longest = max(map(len, self.pod_names)) + len(_RANDOM_ENDING)
    check(
      longest <= _LONGEST_LABEL,
      f'--name={self.name}, which makes pods of {longest} letters',
      f'names of pods of at most {_LONGEST_LABEL} letters',
      f'pass a name that is {longest - _LONGEST_LABEL} letters shorter',
    )
    for flag in ('checkpoint_pvc', 'secret_name', 'namespace'):
      value = getattr(self, flag)
      check(
        value is None or is_dns_subdomain(value),
        f'--{flag}={value}',
        "lower-case letters, digits, '-' and '.', with a letter or a digit at "
        'both ends',
        'pass the name that kubectl shows',
      )

  @property
  def job(self) -> job_lib.Job:
    """How many tasks of which type."""
    # Only a chief can train with parameter servers.
    chief = self.chief or self.num_ps > 0
    return job_lib.Job(self.num_workers, self.num_ps, chief, self.evaluator)

  @property
  def all_counts(self) -> dict[str, int]:
    """The number of tasks by type."""
    return self.job.all_counts

  @property
  def pod_names(self) -> tuple[str, ...]:
    """The longest name of a pod of each type, as a JobSet makes them."""
    return tuple(
      f'{self.name}-{task_type}-0-{count - 1}'
      for task_type, count in self.all_counts.items()
      if count
    )

  @property
  def made_secret_name(self) -> str:
    """The name of the Secret that holds the job's secret."""
    return self.secret_name or f'{self.name}-secret'

  @property
  def gpu_types(self) -> tuple[str, ...]:
    """The types of the tasks that compute gradients."""
    # With parameter servers the chief only hands out steps.
    return ('worker',) if self.num_ps else ('chief', 'worker')

  @property
  def checkpoint_types(self) -> tuple[str, ...]:
    """The types of the tasks that write or read checkpoints."""
    # A claim that one node at a time may mount would keep others from starting.
    return (*self.job.training_types, 'evaluator')


def check_job_name(name: object) -> None:
  """A job's name is a label of the DNS: services are named after it.

  Raises:
    UnsupportedOptionError: it is not.
  """
  is_label = isinstance(name, str) and _DNS_LABEL.fullmatch(name) is not None
  if not is_label or len(name) > _LONGEST_LABEL:
    raise errors.UnsupportedOptionError(
      f'--name={name}',
      f"at most {_LONGEST_LABEL} lower-case letters, digits and '-', with a "
      "letter first and no '-' last (DNS-1035)",
      'pass a name such as --name=mnist-2',
    )


def is_dns_subdomain(name: str) -> bool:
  """Whether Kubernetes takes this as the name of most objects."""
  is_short = len(name) <= _LONGEST_SUBDOMAIN
  return is_short and _DNS_SUBDOMAIN.fullmatch(name) is not None
