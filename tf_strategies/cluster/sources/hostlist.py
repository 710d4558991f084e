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
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tf_strategies import errors
from tf_strategies.cluster import checks

# Names and bracketed sets of numbers, in turn: `rack`, `[1-2]`, `n`, `[1-3]`.
_HOST = r'(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+'
_PIECE = re.compile(r'\[([0-9,-]+)\]|([A-Za-z0-9_.-]+)')
_RANGE = re.compile(r'([0-9]{1,9})(?:-([0-9]{1,9}))?')
_COUNT = re.compile(r'([0-9]{1,9})(?:\(x([0-9]{1,9})\))?')
_Value = TypeVar('_Value')

_MOST = checks.MAX_TASKS
# Of the DNS.
_LONGEST_NAME = 253
_HOSTS = 'hosts such as node[001-003,7],gpu1'
_FIX = 'leave it as Slurm sets it'


def hosts(text: str) -> list[str]:
  """Returns the hosts of a list, leading zeros kept. O(len(text) + hosts)."""
  if not re.fullmatch(f'{_HOST}(?:,{_HOST})*', text):
    raise _bad(text, text, _HOSTS)
  items = re.findall(_HOST, text)
  return _bounded((host for i in items for host in _expanded(i, text)), text)


def numbers(text: str) -> list[int]:
  """Returns the numbers of a list in which repetitions are written `2(x3)`."""
  return _bounded(_repeated(text), text)


def _repeated(text: str) -> Iterator[int]:
  for item in text.split(','):
    match = _COUNT.fullmatch(item)
    if match is None:
      raise _bad(text, item, 'such as 2(x3),1')
    yield from itertools.repeat(int(match[1]), int(match[2] or 1))


def _expanded(item: str, text: str) -> list[str]:
  """Returns the hosts that one item of the list `text` stands for."""
  made = ['']
  for in_brackets, name in _PIECE.findall(item):
    more = _numbers_of(in_brackets, text) if in_brackets else [name]
    if len(made[0]) + len(more[0]) > _LONGEST_NAME:
      raise _bad(text, item, _HOSTS)
    made = _bounded((first + last for first in made for last in more), text)
  return made


def _numbers_of(in_brackets: str, text: str) -> list[str]:
  """Returns the numbers of one pair of brackets, with their leading zeros."""

  def each():
    for item in in_brackets.split(','):
      match = _RANGE.fullmatch(item)
      if match is None or int(match[2] or match[1]) < int(match[1]):
        raise _bad(text, item, _HOSTS)
      for n in range(int(match[1]), int(match[2] or match[1]) + 1):
        yield str(n).zfill(len(match[1]))

  return _bounded(each(), text)


def _bounded(values: Iterable[_Value], text: str) -> list[_Value]:
  """Returns the values as a list; raises for more than there may be."""
  found = list(itertools.islice(values, _MOST + 1))
  if len(found) > _MOST:
    allowed = f'at most {_MOST} hosts or tasks'
    raise checks.bad('its value', text, allowed, _FIX)
  return found


def _bad(text: str, item: str, allowed: str) -> errors.ClusterConfigError:
  return checks.bad(f'its part {checks.show(item)}', text, allowed, _FIX)
