"""All-reduce algorithms by name, one file each.

Every module here is an algorithm: `name.py` defines `name_all_reduce`, a
function of the world size that returns a `Schedule`. A new file is found by
itself. It does not change what `cost_model.choose` picks: its candidates are
listed there.

An algorithm of groups takes their size with its name.

Example:

  >>> build('ring', 4).num_rounds
  6
  >>> build('hierarchical(4)', 8).num_rounds
  8
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import types
from collections.abc import Callable, Mapping

from tf_strategies import option_checks
from tf_strategies.collectives import schedule

ALGORITHMS: Mapping[str, Callable[..., schedule.Schedule]] = (
  types.MappingProxyType(
    {
      module.name: getattr(
        importlib.import_module(f'{__name__}.{module.name}'),
        f'{module.name}_all_reduce',
      )
      for module in pkgutil.iter_modules(__path__)
    }
  )
)
"""From a name to a function from the number of ranks to a `Schedule`."""

# A name, and the size of groups where one is given.
_SPELLING = re.compile(r'(\w+)\(([1-9]\d*)\)')
_GROUPED = 'hierarchical'


def build(name: str, world_size: int) -> schedule.Schedule:
  """Returns the schedule of an algorithm; see `check`.

  Raises:
    ScheduleError: the size of groups in the name does not divide `world_size`.
  """
  check(name)
  spelled = _SPELLING.fullmatch(name)
  if spelled is None:
    return ALGORITHMS[name](world_size)
  return ALGORITHMS[_GROUPED](world_size, int(spelled[2]))


def check(name: str, *others: str, option: str = 'algorithm') -> str:
  """Returns the name of an algorithm, or one of `others` such as 'auto'.

  Errors call it by the name of the `option` that it is.

  Raises:
    UnsupportedOptionError: there is no algorithm of that name.
  """
  if isinstance(name, str):
    spelled = _SPELLING.fullmatch(name)
    if spelled is not None and spelled[1] == _GROUPED:
      return name
  allowed = (*others, *ALGORITHMS)
  option_checks.check_choice(
    option,
    name,
    allowed,
    'use one of these names, or pass a Schedule where one is accepted',
  )
  return name
