"""How many tasks of which type a job has, for the launcher and Kubernetes."""

import dataclasses

from tf_strategies import option_checks
from tf_strategies.cluster import command_line

SECRET_BYTES = 32


@dataclasses.dataclass(frozen=True)
class TaskCounts:
  """How many tasks of which type; the fields are flags.

  An evaluator is not part of the cluster.

  Raises:
    UnsupportedOptionError: a number is negative, or no task would train.

  Example:

    >>> TaskCounts(num_workers=2, chief=True).all_counts
    {'chief': 1, 'worker': 2, 'ps': 0, 'evaluator': 0}
  """

  num_workers: int = command_line.option(
    'Number of workers. With a chief and parameter servers, workers are servers, '
    'and end with the chief.',
    1,
  )
  num_ps: int = command_line.option('Number of parameter servers.', 0)
  chief: bool = command_line.option('Start a chief, too.', False)
  evaluator: bool = command_line.option('Start an evaluator, too.', False)

  def __post_init__(self):
    for name in ('num_workers', 'num_ps'):
      option_checks.check_int(f'--{name}', getattr(self, name), 0)
    option_checks.check(
      self.num_workers or self.chief,
      '--num_workers=0 without --chief',
      'a job in which at least one task trains',
      'pass --num_workers=1 or --chief',
    )

  @property
  def all_counts(self) -> dict[str, int]:
    """Returns the number of tasks by type."""
    return {
      'chief': int(self.chief),
      'worker': self.num_workers,
      'ps': self.num_ps,
      'evaluator': int(self.evaluator),
    }

  @property
  def training_types(self) -> tuple[str, ...]:
    """Returns the types of the tasks whose end is the end of the job."""
    # With parameter servers the chief trains alone: workers are servers too.
    return ('chief',) if self.chief and self.num_ps else ('chief', 'worker')
