"""`Finding`: the result of one check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tf_strategies import errors

OK, NOTE, FAIL = 'ok', 'note', 'FAIL'


@dataclasses.dataclass(frozen=True)
class Finding:
  """The result of one check.

  Attributes:
    state: `OK`; `NOTE`, which does not prevent training; or `FAIL`, which does.
    name: subject of the check, in a word or two.
    what: description of the result.
    fix: advice to the user, or ''.
  """

  state: str
  name: str
  what: str
  fix: str = ''

  def __str__(self):
    lines = [f'{self.state:4}  {self.name:14}  {self.what}']
    if self.fix:
      lines.append(f'{"":22}Fix: {self.fix.removesuffix(".")}.')
    return '\n'.join(lines)


def of(name: str, check: Callable[..., str | Finding], *args) -> Finding:
  """Returns the finding of a check, which returns a text or a finding, or raises.

  Example:

    >>> print(of('port', lambda number: f'{number} is free', 2222))
    ok    port            2222 is free
  """
  try:
    found = check(*args)
  except errors.Error as e:
    return failed(name, e)
  return found if isinstance(found, Finding) else Finding(OK, name, found)


def failed(name: str, error: Exception) -> Finding:
  """Returns the finding for an error of this package.

  Example:

    >>> print(failed('secret', errors.UnsupportedOptionError('a', 'b', 'do c')))
    FAIL  secret          Expected b, got a.
                          Fix: do c.
  """
  what, _, fix = str(error).partition(' Fix: ')
  return Finding(FAIL, name, what, fix)
