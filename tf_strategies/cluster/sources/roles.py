"""Which of a scheduler's equal tasks trains, serves variables or evaluates.

Slurm and an Indexed Job number their tasks and know no types. `VARIABLES`
say what the tasks are, in the order chief, workers, parameter servers, evaluator.

Example:

  >>> from tf_strategies.cluster.sources import roles
  >>> roles.counts({'TFS_NUM_PS': '1'}, total=4)
  {'chief': 1, 'worker': 2, 'ps': 1, 'evaluator': 0}
"""

from collections.abc import Mapping, Sequence

from tf_strategies.cluster import checks, tf_config

DEFAULT_PORT = 2222
VARIABLES = (
  'TFS_NUM_WORKERS',
  'TFS_NUM_PS',
  'TFS_CHIEF',
  'TFS_EVALUATOR',
  'TFS_PORT',
)


def port(environ: Mapping[str, str], default: int = DEFAULT_PORT) -> int:
  """Returns the port of every task."""
  return checks.integer_variable(environ, 'TFS_PORT', 1, 65535, default)


def counts(
  environ: Mapping[str, str], total: int | None = None
) -> dict[str, int]:
  """Returns the number of tasks of each type.

  Where the scheduler does not say how many there are, TFS_NUM_WORKERS must.
  """

  def number(name: str, most: int, default: int | None) -> int:
    return checks.integer_variable(environ, name, 0, most, default)

  num_ps = number('TFS_NUM_PS', checks.MAX_TASKS, 0)
  chief = number('TFS_CHIEF', 1, int(num_ps > 0))
  evaluator = number('TFS_EVALUATOR', 1, 0)
  others = num_ps + chief + evaluator
  rest = None if total is None else max(total - others, 0)
  workers = number('TFS_NUM_WORKERS', checks.MAX_TASKS, rest)
  if total is not None and others + workers != total:
    raise checks.bad(
      'the number of tasks',
      total,
      f'{others + workers}: {chief} chief, {workers} worker, {num_ps} ps and '
      f'{evaluator} evaluator (TFS_CHIEF, TFS_NUM_WORKERS, TFS_NUM_PS, '
      'TFS_EVALUATOR)',
      'start as many tasks, or correct these variables',
    )
  if chief + workers == 0:
    raise checks.bad(
      'the number of chiefs and workers',
      0,
      'at least 1, since another type does not train',
      'set TFS_NUM_WORKERS=1 or more, or TFS_CHIEF=1',
    )
  numbers = chief, workers, num_ps, evaluator
  return dict(zip(checks.JOB_TYPES, numbers, strict=True))


def assign(
  environ: Mapping[str, str], addresses: Sequence[str], place: int
) -> tf_config.Parts:
  """Gives tasks, in the scheduler's order, their types; this one's by its place."""
  found = counts(environ, len(addresses))
  remaining = iter(addresses)
  jobs = {t: [next(remaining) for _ in range(n)] for t, n in found.items() if n}
  tasks = [(t, index) for t, n in found.items() for index in range(n)]
  return tf_config.Parts(jobs, *tasks[place])


def check_alone(environ: Mapping[str, str]) -> None:
  """Raises if several tasks are asked for and no scheduler starts them."""
  if 'TFS_NUM_WORKERS' in environ:
    name, told = 'TFS_NUM_WORKERS', environ
  elif checks.integer_variable(environ, 'TFS_NUM_PS', 0, checks.MAX_TASKS, 0):
    # TFS_NUM_PS asks for no workers: the other tasks of a scheduler are workers.
    name, told = 'TFS_NUM_PS', {**environ, 'TFS_NUM_WORKERS': '0'}
  else:
    return
  with checks.reading(name):
    total = sum(counts(told).values())
    if total > 1:
      raise checks.bad(
        'the number of tasks that it asks for',
        total,
        '1, where neither TF_CONFIG nor a scheduler says which task this is '
        '(JOB_COMPLETION_INDEX, SLURM_PROCID)',
        'start the tasks by python -m tf_strategies.launch, set TF_CONFIG, or '
        f'unset {name} to train in a single process',
      )
