"""Tests and benchmarks start all processes through one runner.

`benchmarks/processes.py` starts programs, and `tests/processes.py` starts
functions. Both set a deadline, and end a process by its process id.
"""

import ast
import re

import pytest
from absl.testing import absltest, parameterized

from tests.architecture import project

pytestmark = pytest.mark.smoke

_STARTS = re.compile(
  r'subprocess\.(Popen|run|call|check_call|check_output|get(status)?output)'
  r'|os\.(fork|forkpty|popen|system|(posix_)?spawn\w*|startfile)'
  r'|pty\.(fork|spawn)'
  r'|multiprocessing\.(\w+\.)?(Process|Pool|get_context)'
  r'|concurrent\.futures\.ProcessPoolExecutor'
  r'|asyncio\.create_subprocess_\w+'
  r'|psutil\.Popen'
)
_EXCEPTIONS = {
  'benchmarks/processes.py': 'the runner of programs',
  'tests/processes.py': 'the runner of functions',
  'tests/process_group/network/sockets_test.py': 'tests what a fork inherits',
  'tests/process_group/network/authentication_test.py': 'runs a process as another user',
  'benchmarks/measure.py': (
    'one process at a time takes the devices of one set; it ends with its '
    'executor, and how long it takes is up to the flags'
  ),
}


def _starts(source: str) -> set[str]:
  """Returns the calls in a file that start a process, such as `subprocess.run`."""
  tree = ast.parse(source)
  names = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        name = alias.asname or alias.name.partition('.')[0]
        names[name] = alias.name if alias.asname else name
    elif isinstance(node, ast.ImportFrom) and node.module:
      for alias in node.names:
        names[alias.asname or alias.name] = f'{node.module}.{alias.name}'
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute | ast.Name):
      name, dot, rest = ast.unparse(node).partition('.')
      full = names.get(name, '') + dot + rest
      if _STARTS.fullmatch(full):
        found.add(full)
  return found


class RunnerTest(parameterized.TestCase):
  def test_only_the_runners_start_processes(self):
    files = project.python_files('tests', 'benchmarks')
    found = {path: _starts(text) for path, text in files.items()}
    found = {path: starts for path, starts in found.items() if starts}
    others = {p: s for p, s in found.items() if p not in _EXCEPTIONS}
    self.assertEmpty(
      others,
      'Start programs with benchmarks.processes (Command, run, run_python) and '
      'functions with tests.processes.',
    )
    # Exceptions that are no longer needed must be removed.
    self.assertCountEqual(found, _EXCEPTIONS)


if __name__ == '__main__':
  absltest.main()
