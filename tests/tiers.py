"""Marks a case of a parameterized test for one of the test runs.

`make test` runs the cases marked `smoke`: one of each mechanism. `make test_all`
runs the cases without a mark. `make soak` runs those marked `soak`. A class or a
method takes pytest's marks; a single row takes a mark here:

  @pytest.mark.soak
  def test_with_a_large_model(self): ...

  @tiers.named_parameters(
    tiers.smoke('ring', 'ring', 4),
    ('tree', 'tree', 4),
    tiers.soak('large_tree', 'tree', 64),
  )
  def test_sum(self, name, n): ...

  @tiers.product(case=[CASES[0], tiers.soak(CASES[1])], rows=(96, 65))
  def test_rows(self, case, rows): ...

  @tiers.named_parameters(*tiers.few(TABLE, 'ring', 'tree'))
  def test_table(self, case): ...

The decorators are absl's and name the tests as absl does. `tests/conftest.py`
adds the marks.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl.testing import parameterized

# From the most frequent run to the least frequent one.
_TIERS = ('smoke', '', 'soak')
_ATTRIBUTE = 'tiers_of_cases'


@dataclasses.dataclass(frozen=True)
class _Marked:
  """A row, or a value of a product, with its tier."""

  tier: str
  row: Any


def smoke(*values: Any) -> Any:
  """Marks a row for `make test`.

  Args:
    *values: the values of the row, or one value: the row itself.
  """
  return _mark('smoke', values)


def soak(*values: Any) -> Any:
  """Marks a row for `make soak` only. Takes the arguments of `smoke`."""
  return _mark('soak', values)


def unmarked(*values: Any) -> Any:
  """Leaves a row unmarked. Takes the arguments of `smoke`."""
  return _mark('', values)


def every(mark: Any, rows: Iterable[Any]) -> list[Any]:
  """Marks each of several rows with `smoke` or `soak`."""
  return [mark(row) for row in rows]


def few(rows: Iterable[Any], *names: str) -> list[Any]:
  """Marks all rows with `soak`, except those with the given names.

  Args:
    rows: names, or rows that begin with a name.
    *names: names of the rows to leave unchanged.

  Raises:
    ValueError: if no row has one of the names.
  """
  rows = list(rows)
  found = [row if isinstance(row, str) else _row(row)[0] for row in rows]
  if missing := set(names) - set(found):
    raise ValueError(f'Expected names of rows, got {sorted(missing)}.')
  return [
    row if name in names else soak(row)
    for row, name in zip(rows, found, strict=True)
  ]


def parameters(*rows: Any) -> Any:
  """Returns `parameterized.parameters`, but rows may be marked."""
  return _decorator(parameterized.parameters, rows, _number)


def named_parameters(*rows: Any) -> Any:
  """Returns `parameterized.named_parameters`, but rows may be marked."""
  return _decorator(parameterized.named_parameters, rows, _name)


def product(
  *mappings: Sequence[Mapping[str, Any]], **values: Sequence[Any]
) -> Any:
  """Returns `parameterized.product`. A combination has the latest tier of its parts."""
  factors = [
    *mappings,
    *([_with_key(key, v) for v in vs] for key, vs in values.items()),
  ]
  rows = []
  for parts in itertools.product(*factors):
    row: dict[str, Any] = {}
    for part in parts:
      row.update(_row(part))
    rows.append(_Marked(max(map(_tier, parts), key=_TIERS.index), row))
  return _decorator(parameterized.parameters, rows, _number)


def mark_of(function: Any, name: str) -> str | None:
  """Returns the tier that a decorator of this module gave to a generated test.

  Args:
    function: the test.
    name: name of the test, including the suffix for its row.
  """
  return getattr(function, _ATTRIBUTE, {}).get(name)


def _mark(tier, values):
  row = values[0] if len(values) == 1 else values
  if isinstance(row, _Marked):
    tier = max(tier, row.tier, key=_TIERS.index)
  return _Marked(tier, _row(row))


def _row(row):
  return row.row if isinstance(row, _Marked) else row


def _tier(row):
  return row.tier if isinstance(row, _Marked) else ''


def _with_key(key, value):
  return _Marked(_tier(value), {key: _row(value)})


def _number(test_name, index, row):
  return f'{test_name}{index}'


def _name(test_name, index, row):
  name = row['testcase_name'] if isinstance(row, Mapping) else row[0]
  return f'{test_name}{"" if name.startswith("_") else "_"}{name}'


def _decorator(absl_decorator, rows, name_of):
  def decorate(test):
    marks = {
      name_of(test.__name__, index, _row(row)): _tier(row)
      for index, row in enumerate(rows)
      if _tier(row)
    }
    # absl copies the attributes of the method to each test that it generates.
    setattr(test, _ATTRIBUTE, marks)
    return absl_decorator([_row(row) for row in rows])(test)

  return decorate


# With --device, only tests that compute on the devices of a strategy run.
_ON_DEVICES = (
  'cross_device',
  'keras',
  'museum',
  'programs',
  'strategies',
)
# Exceptions: tests of CPUs, hosts, TPUs, servers and their messages.
_ON_HOSTS = (
  'strategies/host_input_test.py',
  'strategies/tpu',
  'strategies/parameter_server/batch_message_test.py',
  'strategies/parameter_server/slots_test.py',
  'strategies/parameter_server/traced_step_test.py',
)


def is_on_devices(path: pathlib.Path) -> bool:
  """Returns whether `--device` moves the tests of a file to other devices."""
  path = path.relative_to(pathlib.Path(__file__).parent)
  return any(path.is_relative_to(p) for p in _ON_DEVICES) and not any(
    path.is_relative_to(p) for p in _ON_HOSTS
  )
