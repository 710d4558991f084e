"""Whose lines the launcher shows: `chief,worker:0-1`.

Example:

  >>> from tf_strategies.launch import rank_filter
  >>> sorted(rank_filter.parse('chief,worker:0-1', {'chief': 1, 'worker': 3}))
  ['chief 0', 'worker 0', 'worker 1']
"""

import re
from collections.abc import Mapping

from tf_strategies import errors

_ITEM = re.compile(r'([a-z]+)(?::([0-9]{1,9})(?:-([0-9]{1,9}))?)?')


def parse(text: str, counts: Mapping[str, int]) -> frozenset[str]:
  """The names of the tasks that a filter lets through.

  Args:
    text: types, each perhaps with an index or a range of indices, separated by
      commas.
    counts: how many tasks of each type the job has.

  Returns:
    Names such as `worker 0`.

  Raises:
    UnsupportedOptionError: it is no such list, or names a task that the job
      does not have.
  """
  names: set[str] = set()
  for item in text.split(','):
    match = _ITEM.fullmatch(item.strip())
    if match is None:
      raise _unsupported(text, counts)
    task_type, first, last = match.groups()
    count = counts.get(task_type, 0)
    start = int(first or 0)
    # Without an index: all tasks of the type.
    end = int(last or first) if first else count - 1
    if not 0 <= start <= end < count:
      raise _unsupported(text, counts)
    names |= {f'{task_type} {index}' for index in range(start, end + 1)}
  return frozenset(names)


def _unsupported(
  text: str, counts: Mapping[str, int]
) -> errors.UnsupportedOptionError:
  present = ', '.join(
    task_type if count == 1 else f'{task_type}:0-{count - 1}'
    for task_type, count in counts.items()
    if count
  )
  return errors.UnsupportedOptionError(
    f'--rank_filter={text}',
    f'a list of tasks of this job ({present})',
    "write a type, 'type:index' or 'type:first-last', separated by commas, "
    'such as --rank_filter=chief,worker:0-1',
  )
