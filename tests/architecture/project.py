"""Reads the project's own files for the architecture tests."""

import ast
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator

PYTHON_ROOTS = ('benchmarks', 'examples', 'tests', 'tf_strategies', 'tools')

_GENERATED = re.compile(r'build|dist|site|node_modules|__pycache__|bazel-.*')


def root() -> pathlib.Path:
  """Returns the checkout: TFS_SOURCE_DIR, or the one that contains this file."""
  here = pathlib.Path(__file__).resolve().parents[2]
  return pathlib.Path(os.environ.get('TFS_SOURCE_DIR') or here)


def _is_source_directory(name: str) -> bool:
  if name == '.ci':
    return True
  return not (
    name.startswith('.')
    or name.endswith('.egg-info')
    or _GENERATED.fullmatch(name)
  )


def text_files() -> dict[str, str]:
  """Returns every text file of the project, by its path from the root."""
  files = {}
  for directory, subdirectories, names in os.walk(root()):
    subdirectories[:] = sorted(filter(_is_source_directory, subdirectories))
    for name in sorted(names):
      path = pathlib.Path(directory, name)
      # In the root of a git worktree, .git is a file that names the repository.
      if name == '.git':
        continue
      try:
        text = path.read_text(encoding='utf-8')
      except UnicodeDecodeError:
        continue
      files[path.relative_to(root()).as_posix()] = text
  return files


def python_files(*tops: str) -> dict[str, str]:
  """Returns the Python files under the given top-level directories."""
  return {
    path: text
    for path, text in text_files().items()
    if path.endswith('.py') and path.partition('/')[0] in tops
  }


def module_name(path: str) -> str:
  """Returns the module of a file: `a.b` for `a/b.py`, `a` for `a/__init__.py`."""
  return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


@dataclasses.dataclass(frozen=True)
class Import:
  """One imported name.

  Attributes:
    base: the named module, with relative dots resolved.
    name: the name imported from it; empty for a plain `import base`.
    line: line number.
  """

  base: str
  name: str
  line: int

  @property
  def full(self) -> str:
    """Returns the longest module name that the import may refer to."""
    return f'{self.base}.{self.name}' if self.name else self.base


def _called_name(call: ast.Call) -> str:
  if isinstance(call.func, ast.Attribute):
    return call.func.attr
  return call.func.id if isinstance(call.func, ast.Name) else ''


def imports(path: str, source: str) -> Iterator[Import]:
  """Yields all imports in a file, including `import_module('literal')`."""
  package = path.split('/')[:-1]
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield Import(alias.name, '', node.lineno)
    elif isinstance(node, ast.ImportFrom):
      above = package[: len(package) + 1 - node.level] if node.level else []
      base = '.'.join([*above, *filter(None, [node.module])])
      for alias in node.names:
        yield Import(base, alias.name, node.lineno)
    elif isinstance(node, ast.Call) and _called_name(node) in (
      'import_module',
      '__import__',
    ):
      argument = node.args[0] if node.args else None
      if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield Import(argument.value, '', node.lineno)
