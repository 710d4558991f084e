"""Slurm's short forms: `node[001-003,7],gpu1` and `2(x3),1`.

Example:

  >>> from tf_strategies.cluster.sources import hostlist
  >>> hostlist.hosts('node[08-10,12],gpu1')
  ['node08', 'node09', 'node10', 'node12', 'gpu1']
  >>> hostlist.numbers('2(x3),1')
  [2, 2, 2, 1]
"""

import itertools
import re

from tf_strategies import errors
from tf_strategies.cluster import checks

_RANGE = r'[0-9]{1,9}(?:-[0-9]{1,9})?'
_NUMBERS = rf'\[{_RANGE}(?:,{_RANGE})*\]'
# Names and bracketed sets of numbers, in turn: `rack`, `[1-2]`, `n`, `[1-3]`.
_HOST = rf'(?:[A-Za-z0-9_.-]|{_NUMBERS})+'
_COUNT = re.compile(r'([0-9]{1,9})(?:\(x([0-9]{1,9})\))?')


def hosts(text: str) -> list[str]:
  """Returns the hosts of a list, leading zeros kept."""
  if not re.fullmatch(f'{_HOST}(?:,{_HOST})*', text):
    raise _bad(text, 'hosts such as node[001-003,7],gpu1')
  found: list[str] = []
  for item in re.findall(_HOST, text):
    pieces = [
      _numbers_of(piece[1:-1]) if piece.startswith('[') else [piece]
      for piece in re.split(rf'({_NUMBERS})', item)
    ]
    found += map(''.join, itertools.product(*pieces))
  return found


def _numbers_of(ranges: str) -> list[str]:
  """Returns the numbers of one pair of brackets, with their leading zeros."""
  found: list[str] = []
  for each in ranges.split(','):
    first, _, last = each.partition('-')
    numbers = range(int(first), int(last or first) + 1)
    found += [str(n).zfill(len(first)) for n in numbers]
  return found


def numbers(text: str) -> list[int]:
  """Returns the numbers of a list in which repetitions are written `2(x3)`."""
  found: list[int] = []
  for item in text.split(','):
    match = _COUNT.fullmatch(item)
    if match is None:
      raise _bad(text, 'numbers such as 2(x3),1')
    found += [int(match[1])] * int(match[2] or 1)
  return found


def _bad(text: str, allowed: str) -> errors.ClusterConfigError:
  return checks.bad('its value', text, allowed, 'leave it as Slurm sets it')
