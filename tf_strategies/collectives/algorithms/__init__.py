"""All-reduce algorithms by name, one file each.

Every module here is an algorithm: `name.py` defines `name_all_reduce`, a
function of the world size that makes a `Schedule` of the transfers that it
yields. A new file is found by itself. It does not change what
`cost_model.choose` picks: its candidates are listed there.

An algorithm of groups takes their size with its name.

Example:

  >>> build('ring', 4).num_rounds
  6
  >>> build('hierarchical(4)', 8).num_rounds
  8
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping

from tf_strategies import option_checks
from tf_strategies.collectives import schedule

ALGORITHMS: Mapping[str, Callable[..., schedule.Schedule]] = {
  module.name: getattr(
    importlib.import_module(f'{__name__}.{module.name}'),
    f'{module.name}_all_reduce',
  )
  for module in pkgutil.iter_modules(__path__)
}
"""From a name to a function from the number of ranks to a `Schedule`."""

# An algorithm with the size of its groups.
_GROUPED = re.compile(r'hierarchical\(([1-9]\d*)\)')


def build(name: str, world_size: int) -> schedule.Schedule:
  """Returns the schedule of an algorithm; see `check`.

  Raises:
    ScheduleError: the size of groups in the name does not divide `world_size`.
  """
  check(name)
  grouped = _GROUPED.fullmatch(name)
  if grouped is None:
    return ALGORITHMS[name](world_size)
  return ALGORITHMS['hierarchical'](world_size, int(grouped[1]))


def check(name: str, *others: str, option: str = 'algorithm') -> str:
  """Returns the name of an algorithm, or one of `others` such as 'auto'.

  Errors call it by the name of the `option` that it is.

  Raises:
    UnsupportedOptionError: there is no algorithm of that name.
  """
  if not (isinstance(name, str) and _GROUPED.fullmatch(name)):
    allowed = (*others, *ALGORITHMS)
    option_checks.check_choice(option, name, allowed, 'use one of these names')
  return name
