"""Single values of the environment, checked.

Example:

  >>> from tf_strategies.cluster.sources import variables
  >>> variables.integer({'TFS_PORT': '3000'}, 'TFS_PORT', 1, 65535, 2222)
  3000
"""

import re
from collections.abc import Mapping

from tf_strategies import errors
from tf_strategies.cluster import checks

_DIGITS = re.compile(r'[0-9]{1,15}')


def integer(
  environ: Mapping[str, str],
  name: str,
  least: int,
  most: int,
  default: int | None = None,
) -> int:
  """The number that a variable holds.

  Args:
    environ: the environment.
    name: of the variable.
    least: the least number that is allowed.
    most: the greatest.
    default: what an absent variable means; None if it must be there.

  Raises:
    ClusterConfigError: it is no number in this range, or absent.

  Example:

    >>> integer({}, 'TFS_PORT', 1, 65535, 2222)
    2222
  """
  text = environ.get(name)
  if text is None and default is not None:
    return default
  if text is not None and _DIGITS.fullmatch(text):
    number = int(text)
    if least <= number <= most:
      return number
  raise bad(
    name,
    checks.MISSING if text is None else text,
    f'an integer from {least} to {most}',
    f'set {name}={least if default is None else default}, or another number '
    'of this range',
  )


def bad(
  name: str, value: object, allowed: str, fix: str
) -> errors.ClusterConfigError:
  """The error for the value of a variable, to be raised by the caller.

  Example:

    >>> print(bad('SLURM_PROCID', 'x', 'an integer', 'use srun'))
    SLURM_PROCID: its value is 'x'. Expected an integer. Fix: use srun.
  """
  with checks.reading(name):
    return checks.bad('its value', value, allowed, fix)
