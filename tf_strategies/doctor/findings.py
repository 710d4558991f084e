"""`Finding`: the result of one check."""

from __future__ import annotations

import dataclasses

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


def failed(name: str, error: Exception) -> Finding:
  """Returns the finding for an error of this package.

  Example:

    >>> from tf_strategies import errors
    >>> print(failed('secret', errors.UnsupportedOptionError('a', 'b', 'do c')))
    FAIL  secret          a is not supported. Expected b.
                          Fix: do c.
  """
  what, _, fix = str(error).partition(' Fix: ')
  return Finding(FAIL, name, what, fix)
