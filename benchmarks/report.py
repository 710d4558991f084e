"""What a run found, as a table to read and as JSON to keep.

The benchmark of `tfs.data` is a part of the package, which cannot import this
one, so the functions are there.

Example:

  >>> print(markdown(['op', 'ms'], [['ring', 1.25], ['tree', None]]))
  | op   |   ms |
  | :--- | ---: |
  | ring | 1.25 |
  | tree |      |
"""

from tf_strategies.data.benchmark.report import (
  environment,
  markdown,
  write_json,
)

__all__ = ['environment', 'markdown', 'write_json']
