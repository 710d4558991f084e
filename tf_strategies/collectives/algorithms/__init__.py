"""All-reduce algorithms by name, one file each.

Every module here is an algorithm: `name.py` defines `name_all_reduce`, a
function of the world size that returns a `Schedule`. A new file is found by
itself. It does not change what `cost_model.choose` picks: its candidates are
listed there.

Example:

  >>> build('ring', 4).num_rounds
  6
"""

from __future__ import annotations

import importlib
import pkgutil
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


def build(name: str, world_size: int) -> schedule.Schedule:
  """The schedule of an algorithm with its defaults; see `check`."""
  return ALGORITHMS[check(name)](world_size)


def check(name: str, *others: str) -> str:
  """Returns the name of an algorithm, or one of `others` such as 'auto'.

  Raises:
    UnsupportedOptionError: there is no algorithm of that name.
  """
  allowed = (*others, *ALGORITHMS)
  option_checks.check_choice(
    'algorithm',
    name,
    allowed,
    'use one of these names, or pass a Schedule where one is accepted',
  )
  return name
