"""Writes the results of benchmarks as tables and as JSON.

Example:

  >>> from benchmarks import report
  >>> print(report.markdown(['stage', 'ms'], [['map', 3.125]]))
  | stage |   ms |
  | :---- | ---: |
  | map   | 3.12 |
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from tf_strategies import errors, version

# A number in a table.
_NUMBER = re.compile(r'[-+]?[\d,]+(\.\d+)?(e[-+]\d+)?( ?%)?')
# The directories of an absolute path, or of one that begins with `../`.
_DIRECTORIES = re.compile(r'(?<![^=,])(?:/|\.\./)(?:[^,=]*/)?')
# A list of numbers or words with one per line.
_LIST = re.compile(r'\[\n\s+([^][{}]+?)\n\s+\]')


def environment() -> dict[str, object]:
  """Returns command, hardware, versions, load and date.

  They do not contain the name of the host or its directories.
  """
  # Imported late, because programs that only write tables may lack both.
  import numpy as np
  import tensorflow as tf

  return {
    'command': command(),
    'hardware': {
      'cpu_model': _cpu_model(),
      'cpu_count': os.cpu_count(),
      'memory_bytes': _memory_bytes(),
      'gpus': [
        tf.config.experimental.get_device_details(gpu).get('device_name')
        for gpu in tf.config.list_physical_devices('GPU')
      ],
    },
    'versions': {
      'python': platform.python_version(),
      'tensorflow': tf.__version__,
      'numpy': np.__version__,
      'tf_strategies': version.__version__,
    },
    'load_average': list(os.getloadavg()),
    'date': datetime.datetime.now(datetime.timezone.utc).isoformat(
      timespec='seconds'
    ),
  }


def command() -> str:
  """Returns the command that started this program, without local directories."""
  # With `python -m`, the first argument is the file.
  spec = getattr(sys.modules['__main__'], '__spec__', None)
  started = [sys.argv[0]]
  if spec is not None:
    started = ['-m', spec.name.removesuffix('.__main__')]
  words = ['python', *started, *sys.argv[1:]]
  return shlex.join(map(without_directories, words))


def without_directories(text: str) -> str:
  """Returns a flag or its value without the directories of this machine.

  Example:

    >>> without_directories('--files=/home/me/a.npz,data/b.npz')
    '--files=/path/to/a.npz,data/b.npz'
  """
  return _DIRECTORIES.sub('/path/to/', text)


def check_target(option: str, path: str | None) -> None:
  """Checks before the runs that a file can be written.

  Args:
    option: name of the option for the file.
    path: path of the file, or None for no file.

  Raises:
    UnsupportedOptionError: if its directory is missing or not writable, or the path
      exists and is not a writable file.
  """
  if path is None:
    return
  directory = os.path.dirname(os.path.abspath(path))
  problem = ''
  if os.path.isdir(path):
    problem = 'is a directory'
  elif os.path.exists(path) and not os.access(path, os.W_OK):
    problem = 'is there and cannot be written'
  else:
    try:
      tempfile.TemporaryFile(dir=directory).close()
    except OSError as e:
      problem = f'its directory cannot be written: {e.strerror}'
  if problem:
    raise errors.UnsupportedOptionError(
      f'{option}={path!r} ({problem})',
      'a file in a directory that can be written',
      f'make the directory, or write --{option} with another path',
    )


def write_json(path: str, content: Mapping[str, object]) -> None:
  """Writes `content` to `path`, replacing the file atomically.

  Each list of samples is on one line, because reports are kept with the sources.
  """
  text = _LIST.sub(
    lambda match: '[' + re.sub(r'\n\s+', ' ', match[1]) + ']',
    json.dumps(content, indent=2),
  )
  unfinished = f'{path}.unfinished'
  with open(unfinished, 'w', encoding='utf-8') as f:
    f.write(f'{text}\n')
  os.replace(unfinished, path)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  """Returns a Markdown table. Text is left-aligned, and numbers are right-aligned.

  Text that is a number is right-aligned too.

  Example:

    >>> print(markdown(['op', 'ms'], [['ring', 1.25], ['tree', None]]))
    | op   |   ms |
    | :--- | ---: |
    | ring | 1.25 |
    | tree |      |

  Args:
    columns: title of each column.
    rows: cells of each row, one per column. None is an empty cell.
  """
  found = [[_cell(value) for value in row] for row in rows]
  is_text = [
    any(row[i] and not _NUMBER.fullmatch(row[i]) for row in found)
    for i in range(len(columns))
  ]
  cells = [list(columns), *found]
  widths = [
    max(4, *(len(row[i]) for row in cells)) for i in range(len(columns))
  ]

  def line(row):
    padded = [
      text.ljust(width) if left else text.rjust(width)
      for text, width, left in zip(row, widths, is_text, strict=True)
    ]
    return f'| {" | ".join(padded)} |'

  rule = [
    f':{"-" * (width - 1)}' if left else f'{"-" * (width - 1)}:'
    for width, left in zip(widths, is_text, strict=True)
  ]
  return '\n'.join([line(cells[0]), line(rule), *map(line, cells[1:])])


def _cell(value: object) -> str:
  if value is None:
    return ''
  return f'{value:.2f}' if isinstance(value, float) else str(value)


def _cpu_model() -> str:
  try:
    with open('/proc/cpuinfo', encoding='utf-8') as f:
      for line in f:
        if line.startswith('model name'):
          return line.partition(':')[2].strip()
  except OSError:
    pass  # Not Linux.
  return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
  try:
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (AttributeError, ValueError, OSError):
    return None  # Not POSIX.
