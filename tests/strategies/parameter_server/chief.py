"""Runs many small programs in one chief, so that it starts only once."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests import parameter_servers


class Programs:
  """Results of programs that run in the chief of a job, one after another.

  Args:
    programs: module functions by name. Each runs even if others fail.
    args: arguments of every program.
    num_workers: number of workers of the job.
    num_ps: number of servers of the job.
  """

  def __init__(
    self,
    programs: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
    num_workers: int = 2,
    num_ps: int = 2,
  ):
    with parameter_servers.Job(num_workers, num_ps) as job:
      self._found = job.run(_run_all, (dict(programs), tuple(args)))

  def __getitem__(self, name: str) -> Any:
    """Returns the result of a program. Fails with its traceback if it raised."""
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
