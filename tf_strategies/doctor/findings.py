"""`Finding`: what one check found."""

from __future__ import annotations

import dataclasses

OK, NOTE, FAIL = 'ok', 'note', 'FAIL'


@dataclasses.dataclass(frozen=True)
class Finding:
  """What one check found.

  Attributes:
    state: `OK`; `NOTE`, which hinders nothing; or `FAIL`, which training would end
      with.
    name: what was looked at, in a word or two.
    what: was found.
    fix: what to do, if there is something.
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
  """The finding that an error of this package is.

  Example:

    >>> from tf_strategies import errors
    >>> print(failed('secret', errors.UnsupportedOptionError('a', 'b', 'do c')))
    FAIL  secret          a is not supported. Expected b.
                          Fix: do c.
  """
  what, _, fix = str(error).partition(' Fix: ')
  return Finding(FAIL, name, what, fix)
