"""What a cluster description may hold; everything else is an error at once.

TensorFlow's own strategies hang on some of these values (a duplicate address, a
missing task), so they are rejected here, by a ClusterConfigError
that names the value.

Example:

  >>> from tf_strategies.cluster import checks
  >>> checks.checked_index('1', 'task.index')
  1
"""

import contextlib
import contextvars
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tf_strategies import errors

# In the order in which tasks are listed: the chief leads a ring.
JOB_TYPES = ('chief', 'worker', 'ps', 'evaluator')
TRAINING_JOB_TYPES = ('chief', 'worker')
MAX_TASKS = 100_000

_ALLOWED_TYPES = 'chief, master, worker, ps or evaluator'
_ADDRESS_FIX = "write it as 'host:port', such as 'worker-0.job.svc:2222'"
_HOST = re.compile(r'[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?')
_BRACKETS = re.compile(r'\[[0-9A-Za-z:.%_-]+\]')
_NUMBER = re.compile(r'[0-9]{1,9}')
_LONG_NUMBER = re.compile(r'[0-9]{1,15}')
_LONGEST = 120

# In place of a value that is not there.
MISSING = object()

# The variable that is being read, which errors begin with.
_READING = contextvars.ContextVar('reading', default='TF_CONFIG')


@contextlib.contextmanager
def reading(variable: str) -> Iterator[None]:
  """A context in which errors name `variable` instead of TF_CONFIG."""
  token = _READING.set(variable)
  try:
    yield
  finally:
    _READING.reset(token)


def variable() -> str:
  """The variable that is being read."""
  return _READING.get()


def show(value: Any) -> str:
  """A value as an error shows it: short, and in characters that print."""
  try:
    text = 'missing' if value is MISSING else ascii(value)
  except RecursionError:
    # Brackets nested as deep as the parser could just follow.
    text = 'nested too deep to be shown'
  return text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'


def bad(
  what: str, value: Any, allowed: str, fix: str
) -> errors.ClusterConfigError:
  """The error for one value of a cluster description.

  Args:
    what: where the value is, such as `task.index`.
    value: what was found there.
    allowed: what may be there.
    fix: what to write instead.

  Returns:
    The error, to be raised by the caller.
  """
  return errors.ClusterConfigError(
    f'{variable()}: {what} is {show(value)}. Expected {allowed}. Fix: {fix}.'
  )


def integer_variable(
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
  """
  text = environ.get(name)
  if text is None and default is not None:
    return default
  if text is not None and _LONG_NUMBER.fullmatch(text):
    number = int(text)
    if least <= number <= most:
      return number
  raise bad_variable(
    name,
    MISSING if text is None else text,
    f'an integer from {least} to {most}',
    f'set {name}={least if default is None else default}, or another number '
    'of this range',
  )


def bad_variable(
  name: str, value: object, allowed: str, fix: str
) -> errors.ClusterConfigError:
  """The error for the value of a variable, to be raised by the caller."""
  with reading(name):
    return bad('its value', value, allowed, fix)


def checked_type(value: Any, what: str) -> str:
  """A job's type; `master`, the chief's older name, becomes `chief`."""
  if value == 'master':
    return 'chief'
  if isinstance(value, str) and value in JOB_TYPES:
    return value
  raise bad(
    what, value, _ALLOWED_TYPES, 'use one of these names, in lower case'
  )


def checked_index(value: Any, what: str) -> int:
  """A task's index: an integer, or its digits as TensorFlow accepts them."""
  # bool is an int to Python, and True would quietly be worker 1.
  if isinstance(value, int) and not isinstance(value, bool):
    number = value
  elif isinstance(value, str) and _NUMBER.fullmatch(value):
    number = int(value)
  else:
    number = -1
  if 0 <= number < MAX_TASKS:
    return number
  raise bad(
    what,
    value,
    f'an integer from 0 to {MAX_TASKS - 1}',
    'count the tasks of a job from 0 and write the number without quotes',
  )


def split_address(
  value: Any, what: str, least_port: int = 1
) -> tuple[str, int]:
  """Host and port of an address; the host in lower case, for comparisons.

  Args:
    value: 'host:port' or '[IPv6]:port'.
    what: where it was found, for the error.
    least_port: 0 where the operating system may choose the port.
  """
  if not isinstance(value, str):
    raise bad(what, value, 'a string host:port', _ADDRESS_FIX)
  host, colon, port = value.rpartition(':')
  if not colon:
    raise bad(what, value, 'host:port, with a port', _ADDRESS_FIX)
  if not _NUMBER.fullmatch(port) or not least_port <= int(port) <= 65535:
    raise bad(what, value, f'a port from {least_port} to 65535', _ADDRESS_FIX)
  normal = _normal_host(host)
  if normal is None:
    raise bad(
      what,
      value,
      'host:port with a host name, an IPv4 address or an IPv6 address in '
      'brackets, without a scheme and without spaces',
      _ADDRESS_FIX,
    )
  return normal, int(port)


def _normal_host(host: str) -> str | None:
  """One spelling for all spellings of a host; None if it is none."""
  if _HOST.fullmatch(host):
    return host.lower()
  if not _BRACKETS.fullmatch(host):
    return None
  try:
    return str(ipaddress.IPv6Address(host[1:-1]))
  except ValueError:
    return None


def check_addresses(jobs: Mapping[str, Mapping[int, str]]) -> None:
  """Every address is well-formed, and no two tasks have the same.

  O(number of tasks).
  """
  owners: dict[tuple[str, int], str] = {}
  for job, tasks in jobs.items():
    for index, address in tasks.items():
      what = f'cluster.{job}[{index}]'
      key = split_address(address, what)
      if key in owners:
        raise bad(
          what,
          address,
          f'an address that no other task has, but {owners[key]} has it',
          'give every task a host or a port of its own',
        )
      owners[key] = what


def check_jobs(jobs: Mapping[str, Mapping[int, str]]) -> None:
  """There are tasks, at most one of them a chief, and all can be told apart."""
  if not jobs:
    raise bad(
      'cluster',
      {},
      'at least one job with at least one address',
      f'list the addresses of the tasks, or unset {variable()} to train in a '
      'single process',
    )
  for job, tasks in jobs.items():
    if not tasks:
      raise bad(
        f'cluster.{job}',
        [],
        'a list of at least one address',
        f'list the addresses of its tasks, or leave {job} out',
      )
  chiefs = sorted(jobs.get('chief', {}))
  if chiefs not in ([], [0]):
    raise bad(
      'cluster.chief',
      dict(jobs['chief']),
      'one chief, of index 0',
      'keep one address and list the others as workers',
    )
  check_addresses(jobs)


def check_task(
  jobs: Mapping[str, Mapping[int, str]], task_type: str, task_index: int
) -> None:
  """The task is one of the cluster's, or an evaluator beside it."""
  if task_type not in jobs:
    if task_type == 'evaluator':
      return
    raise bad(
      'task.type',
      task_type,
      f'a job of the cluster ({", ".join(jobs)}), or evaluator',
      f'list the addresses of {task_type} in cluster as well',
    )
  if task_index not in jobs[task_type]:
    raise bad(
      'task.index',
      task_index,
      f'{_ranges(jobs[task_type])}, the tasks of {task_type} in cluster',
      'count from 0, or add the address of this task to cluster',
    )


def _ranges(indices: Iterable[int]) -> str:
  """Indices as a person writes them: `0`, `0 to 3`, `1, 4, 7`."""
  numbers = sorted(indices)
  if len(numbers) > 1 and numbers == list(range(len(numbers))):
    return f'0 to {numbers[-1]}'
  text = ', '.join(map(str, numbers[:10]))
  return text if len(numbers) <= 10 else f'{text} and {len(numbers) - 10} more'
