"""Slurm's short forms: `node[001-003,7],gpu1` and `2(x3),1`.

Both are bounded before anything is expanded: a few characters, such as
`a[0-99999999]`, can stand for more hosts than there is memory.

Example:

  >>> from tf_strategies.cluster.sources import hostlist
  >>> hostlist.hosts('node[08-10,12],gpu1')
  ['node08', 'node09', 'node10', 'node12', 'gpu1']
  >>> hostlist.numbers('2(x3),1')
  [2, 2, 2, 1]
"""

import itertools
import math
import re

from tf_strategies import errors
from tf_strategies.cluster import checks

# Names and bracketed sets of numbers, in turn: `rack`, `[1-2]`, `n`, `[1-3]`.
_HOST = r'(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+'
_PIECE = re.compile(r'\[([0-9,-]+)\]|([A-Za-z0-9_.-]+)')
_RANGE = re.compile(r'([0-9]{1,9})(?:-([0-9]{1,9}))?')
_COUNT = re.compile(r'([0-9]{1,9})(?:\(x([0-9]{1,9})\))?')
_MOST = checks.MAX_TASKS
# Of the DNS.
_LONGEST_NAME = 253
_HOSTS = 'hosts such as node[001-003,7],gpu1'
_FIX = 'leave it as Slurm sets it'


def hosts(text: str) -> list[str]:
  """Returns the hosts of a list, leading zeros kept. O(len(text) + hosts)."""
  if not re.fullmatch(f'{_HOST}(?:,{_HOST})*', text):
    raise _bad(text, text, _HOSTS)
  found: list[str] = []
  for item in re.findall(_HOST, text):
    found += _expanded(item, text, _MOST - len(found))
  return found


def numbers(text: str) -> list[int]:
  """Returns the numbers of a list in which repetitions are written `2(x3)`."""
  found: list[int] = []
  for item in text.split(','):
    match = _COUNT.fullmatch(item)
    if match is None:
      raise _bad(text, item, 'such as 2(x3),1')
    repetitions = int(match[2] or 1)
    if len(found) + repetitions > _MOST:
      raise _too_many(text)
    found += [int(match[1])] * repetitions
  return found


def _expanded(item: str, text: str, most: int) -> list[str]:
  """Returns the hosts that one item of the list `text` stands for."""
  sets: list[list[str]] = []
  room = most
  for in_brackets, name in _PIECE.findall(item):
    made = _numbers_of(in_brackets, text, room) if in_brackets else [name]
    sets.append(made)
    # Further brackets of this item multiply what there is.
    room //= len(made)
  if math.prod(map(len, sets)) > most:
    raise _too_many(text)
  if sum(max(map(len, made)) for made in sets) > _LONGEST_NAME:
    raise _bad(text, item, _HOSTS)
  return list(map(''.join, itertools.product(*sets)))


def _numbers_of(in_brackets: str, text: str, most: int) -> list[str]:
  """Returns the numbers of one pair of brackets, with their leading zeros."""
  found: list[str] = []
  for item in in_brackets.split(','):
    match = _RANGE.fullmatch(item)
    if match is None or int(match[2] or match[1]) < int(match[1]):
      raise _bad(text, item, _HOSTS)
    first, last = match[1], match[2] or match[1]
    if len(found) + int(last) - int(first) + 1 > most:
      raise _too_many(text)
    found += [
      str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)
    ]
  return found


def _bad(text: str, item: str, allowed: str) -> errors.ClusterConfigError:
  return checks.bad(f'its part {checks.show(item)}', text, allowed, _FIX)


def _too_many(text: str) -> errors.ClusterConfigError:
  return checks.bad('its value', text, f'at most {_MOST} hosts or tasks', _FIX)
