"""Checks of the values of a cluster description.

TensorFlow's own strategies hang on some wrong values. Here each is an error at
once, which names the variable and the value.

Example:

  >>> from tf_strategies.cluster import checks
  >>> checks.checked_index('1', 'task.index')
  1
"""

import contextlib
import contextvars
import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tf_strategies import errors, option_checks

# In the order in which tasks are listed: the chief leads a ring.
JOB_TYPES = ('chief', 'worker', 'ps', 'evaluator')
TRAINING_JOB_TYPES = ('chief', 'worker')
MAX_TASKS = 100_000

_ADDRESS_FIX = "write it as 'host:port', such as 'worker-0.job.svc:2222'"
_HOST = re.compile(r'[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?')
_BRACKETS = re.compile(r'\[[0-9A-Za-z:.%_-]+\]')
_NUMBER = re.compile(r'[0-9]{1,15}')
_LONGEST = 120

# In place of a value that is not there.
MISSING = object()

# The variable that is being read, which errors begin with.
_READING = contextvars.ContextVar('reading', default='TF_CONFIG')


@contextlib.contextmanager
def reading(variable: str) -> Iterator[None]:
  """Context in which errors name `variable` instead of TF_CONFIG."""
  token = _READING.set(variable)
  try:
    yield
  finally:
    _READING.reset(token)


def show(value: Any) -> str:
  """Returns a value as an error shows it: short, and in characters that print."""
  text = 'missing' if value is MISSING else ascii(value)
  return text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'


def bad(
  what: str, value: Any, allowed: str, fix: str
) -> errors.ClusterConfigError:
  """Returns the error for the value of `what`, such as `task.index`."""
  return errors.ClusterConfigError(
    f'Expected {allowed}, got {_READING.get()}: {what} is {show(value)}. Fix: {fix}.'
  )


def bad_variable(
  name: str, value: Any, allowed: str, fix: str
) -> errors.ClusterConfigError:
  """Returns the error for the value of another variable."""
  with reading(name):
    return bad('its value', value, allowed, fix)


def integer_variable(
  environ: Mapping[str, str],
  name: str,
  least: int,
  most: int,
  default: int | None = None,
) -> int:
  """Returns the number that a variable holds; it may be absent if there is a default."""
  text = environ.get(name, MISSING)
  if text is MISSING and default is not None:
    return default
  if text is not MISSING and _NUMBER.fullmatch(text):
    number = int(text)
    if least <= number <= most:
      return number
  raise bad_variable(
    name,
    text,
    f'an integer from {least} to {most}',
    f'set {name}={least if default is None else default}, or another number '
    'of this range',
  )


def checked_type(value: Any, what: str) -> str:
  """Returns a job's type."""
  if isinstance(value, str) and value in JOB_TYPES:
    return value
  meant = option_checks.nearest(value, JOB_TYPES)
  raise bad(
    what,
    value,
    'chief, worker, ps or evaluator',
    f'write {meant!r}' if meant else 'use one of these names, in lower case',
  )


def checked_index(value: Any, what: str) -> int:
  """Returns a task's index: an integer, or its digits as TensorFlow accepts them."""
  if option_checks.is_int(value) or (
    isinstance(value, str) and _NUMBER.fullmatch(value)
  ):
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
  """Returns the host, in one spelling of all, and port of 'host:port' or '[IPv6]:port'.

  Args:
    value: the address.
    what: where it was found, for the error.
    least_port: 0 where the operating system may choose the port.
  """
  text = value if isinstance(value, str) else ''
  host, colon, port = text.rpartition(':')
  normal = _normal_host(host)
  if not colon:
    expected = 'a string host:port, with a port'
  elif not _NUMBER.fullmatch(port) or not least_port <= int(port) <= 65535:
    expected = f'a port from {least_port} to 65535'
  elif normal is None:
    expected = (
      'host:port with a host name, an IPv4 address or an IPv6 address in '
      'brackets, without a scheme and without spaces'
    )
  else:
    return normal, int(port)
  raise bad(what, value, expected, _ADDRESS_FIX)


def _normal_host(host: str) -> str | None:
  """Returns one spelling for all spellings of a host; None if it is none."""
  if _HOST.fullmatch(host):
    return host.lower()
  if not _BRACKETS.fullmatch(host):
    return None
  try:
    return str(ipaddress.IPv6Address(host[1:-1]))
  except ValueError:
    return None
