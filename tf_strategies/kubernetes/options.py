"""What a manifest is made of, checked before anything is written."""

import dataclasses

from tf_strategies import option_checks
from tf_strategies.cluster import checks, command_line
from tf_strategies.cluster import job as job_lib

_LONGEST_LABEL = 63
# What Kubernetes adds to a pod's name.
_RANDOM_ENDING = '-abcde'


@dataclasses.dataclass(frozen=True)
class Options(job_lib.TaskCounts):
  """A job on Kubernetes; the fields are the flags of the command.

  Kubernetes itself checks names when it gets a manifest.

  Raises:
    UnsupportedOptionError: no job has such a number, or the job's controller would
      fail later.

  Example:

    >>> Options(image='mnist:1', num_workers=2, num_ps=1).all_counts
    {'chief': 1, 'worker': 2, 'ps': 1, 'evaluator': 0}
  """

  image: str | None = command_line.option(
    'Image of the container that every task runs in. It must be given.'
  )
  name: str = command_line.option('Name of the job.', 'tf-strategies')
  gpus_per_worker: int = command_line.option(
    'GPUs of each task that computes gradients.', 0
  )
  checkpoint_pvc: str | None = command_line.option(
    'PersistentVolumeClaim for checkpoints, which the evaluator and the tasks '
    'that train mount at /checkpoints: with parameter servers the chief alone. '
    'Tasks on several nodes need ReadWriteMany.'
  )
  secret_name: str | None = command_line.option(
    'Secret that exists, with the key `secret`; default a new one.'
  )
  max_restarts: int = command_line.option(
    'How often each task is started again, on average.', 3
  )

  def __post_init__(self):
    # Only a chief can train with parameter servers.
    object.__setattr__(self, 'chief', self.chief or self.num_ps > 0)
    super().__post_init__()
    option_checks.check(
      self.image and not any(c.isspace() for c in self.image),
      f'--image={self.image!r}',
      'the name of an image, without spaces',
      'pass --image=registry/mnist:1',
    )
    for flag in ('gpus_per_worker', 'max_restarts'):
      option_checks.check_int(f'--{flag}', getattr(self, flag), 0)
    counts = self.all_counts
    option_checks.check(
      sum(counts.values()) <= checks.MAX_TASKS,
      f'a job of {sum(counts.values())} tasks',
      f'at most {checks.MAX_TASKS}',
      'pass smaller --num_workers and --num_ps',
    )
    # As a JobSet names pods.
    pods = (f'{self.name}-{t}-0-{n - 1}' for t, n in counts.items() if n)
    longest = max(map(len, pods)) + len(_RANDOM_ENDING)
    option_checks.check(
      longest <= _LONGEST_LABEL,
      f'--name={self.name}, which makes names of {longest} letters',
      f'names of pods of at most {_LONGEST_LABEL} letters',
      f'pass a name that is {longest - _LONGEST_LABEL} letters shorter',
    )
