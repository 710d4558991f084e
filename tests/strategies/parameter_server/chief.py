"""Runs many small programs in one chief, so that its start is paid for once."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests import parameter_servers


class Programs:
  """What came out of programs that one chief ran one after the other.

  Args:
    job: whose chief runs them.
    programs: module functions by name; each runs whatever the others did.
    args: of all of them.
  """

  def __init__(
    self,
    job: parameter_servers.Job,
    programs: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
  ):
    self._found = job.run(_run_all, (dict(programs), tuple(args)))

  def __getitem__(self, name: str) -> Any:
    """What a program returned; fails with its traceback if it raised."""
    value, error = self._found[name]
    if error:
      raise AssertionError(f'{name}: {error}')
    return value


def _run_all(programs, args):
  found = {}
  for name, program in programs.items():
    try:
      found[name] = program(*args), ''
    except Exception:
      found[name] = None, traceback.format_exc()
  return found
