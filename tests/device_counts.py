"""Prints the tests that ran, by directory, at the end of a run with `--device`."""

import collections
import re

_COLUMNS = ('passed', 'failed', 'skipped')
# A strategy in the name of a row, such as `ring_mirrored_clipnorm`, `ring_2x1`.
_IN_PROCESS = re.compile(r'_(ring_mirrored|central_storage|servers)(?![a-z])')
_WORKERS = re.compile(r'_(ring|collective|mpi)_\d')


def name_of(nodeid: str) -> str:
  """Returns the directory of a test, and the strategy if the test runs a program."""
  path, _, test = nodeid.partition('::')
  folder, *rest = path.removeprefix('tests/').split('/')
  if folder == 'strategies' and len(rest) > 1:
    return f'{folder}/{rest[0]}'
  if folder != 'programs':
    return folder
  if found := _IN_PROCESS.search(test):
    return f'{folder}, {found[1]}'
  if found := _WORKERS.search(test):
    return f'{folder}, multi_worker_{found[1]}'
  return f'{folder}, others'


class DeviceCounts:
  """A pytest plugin for processes with a terminal."""

  def __init__(self, device: str):
    self._device = device
    self._counts = collections.defaultdict(collections.Counter)

  def pytest_runtest_logreport(self, report):
    """Counts a test once. A failure in its setup or teardown counts as a failure."""
    is_subtest = hasattr(report, 'context')
    if not is_subtest and (report.when == 'call' or not report.passed):
      self._counts[name_of(report.nodeid)][report.outcome] += 1

  def pytest_terminal_summary(self, terminalreporter):
    """Prints one line for each name."""
    if self._counts:
      terminalreporter.section(f'--device={self._device}')
    for line in self.lines():
      terminalreporter.write_line(line)

  def lines(self) -> list[str]:
    """Returns one line for each name."""
    width = max(map(len, self._counts), default=0)
    return [
      f'{name:{width}} '
      + ', '.join(f'{counts[column]:4} {column}' for column in _COLUMNS)
      for name, counts in sorted(self._counts.items())
    ]
