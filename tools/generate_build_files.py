"""Writes every BUILD file from the imports of the Python files beside it.

  python tools/generate_build_files.py           # write
  python tools/generate_build_files.py --check   # exit 1 if any is stale

One target a file: `py_test` for `*_test.py`, `py_binary` for a file with a
`__main__` block, `py_library` otherwise; `deps` are the file's imports, also
those inside functions. A package's `__init__.py` is the target that carries the
package's name. The output is what buildifier would print.
"""

import argparse
import ast
import dataclasses
import pathlib
import sys
from collections.abc import Iterator

ROOTS = ('benchmarks', 'examples', 'tests', 'tf_strategies', 'tools')

# Import name -> name of the distribution, as `@pypi//<name>` spells it. All of
# them are pinned in tools/requirements_lock.txt.
EXTERNAL = {
  'absl': 'absl_py',
  'google': 'protobuf',
  'grpc': 'grpcio',
  'h5py': 'h5py',
  'hypothesis': 'hypothesis',
  'keras': 'keras',
  'ml_dtypes': 'ml_dtypes',
  'numpy': 'numpy',
  'psutil': 'psutil',
  'pytest': 'pytest',
  'setuptools': 'setuptools',
  'sklearn': 'scikit_learn',
  'tensorboard': 'tensorboard',
  'tensorflow': 'tensorflow',
  'typing_extensions': 'typing_extensions',
}

# Imported only where they happen to be installed (peers in benchmarks,
# extra transports): never a dependency of a target.
OPTIONAL = frozenset(
  {
    'griffe',
    'horovod',
    'jsonschema',
    'keras_tuner',
    'mkdocs',
    'mpi4py',
    'torch',
    'tf_keras',
    'xprof',
    'yaml',
  }
)

# Targets whose files read other files of the project.
DATA = {
  'tests/architecture/project.py': ('//:all_files',),
  # Says to type checkers that there are annotations.
  'tf_strategies/__init__.py': ('py.typed',),
  'tf_strategies/kubernetes/manifests.py': ('templates.yaml',),
}

_GLOB_EXCLUDES = '["**/__pycache__/**"]'


@dataclasses.dataclass(frozen=True)
class Target:
  """One Python file as a build target."""

  kind: str
  name: str
  source: str
  deps: tuple[str, ...]
  data: tuple[str, ...]


def _is_main_block(node: ast.stmt) -> bool:
  return (
    isinstance(node, ast.If)
    and isinstance(node.test, ast.Compare)
    and isinstance(node.test.left, ast.Name)
    and node.test.left.id == '__name__'
  )


def _label_order(label: str) -> tuple:
  """Buildifier's order: own package, own repository, other repositories."""
  phase = 1 if label.startswith(':') else 2 if label.startswith('//') else 3
  return phase, label.replace(':', '.').split('.')


class Project:
  """The Python files under a root, and the labels that name them."""

  def __init__(self, root: pathlib.Path):
    self._root = root
    self.unresolved: set[str] = set()
    self._files = {
      path.relative_to(root)
      for top in ROOTS
      for path in (root / top).rglob('*.py')
      if '__pycache__' not in path.parts
    }

  def packages(self) -> list[pathlib.Path]:
    """Directories that get a BUILD file: those with Python files, and roots."""
    directories = {file.parent for file in self._files}
    for directory in list(directories):
      directories.update(directory.parents)
    return sorted(directories - {pathlib.Path('.')})

  def target_name(self, file: pathlib.Path) -> str:
    """The target's name: the file's stem, or the package's own name."""
    if file.name != '__init__.py':
      return file.stem
    name = file.parent.name
    if file.with_name(f'{name}.py') in self._files:
      return f'{name}_package'
    return name

  def _label(self, file: pathlib.Path, package: pathlib.Path) -> str:
    name = self.target_name(file)
    if file.parent == package:
      return f':{name}'
    if name == file.parent.name:
      return f'//{file.parent.as_posix()}'
    return f'//{file.parent.as_posix()}:{name}'

  def _find(self, module: str) -> pathlib.Path | None:
    """The file of a dotted module name, if it is one of this project's."""
    path = pathlib.Path(*module.split('.'))
    for candidate in (path.with_suffix('.py'), path / '__init__.py'):
      if candidate in self._files:
        return candidate
    return None

  def _imports(self, file: pathlib.Path) -> Iterator[list[str]]:
    """Yields the module names to try for each imported name, longest first."""
    tree = ast.parse((self._root / file).read_text(encoding='utf-8'))
    for node in ast.walk(tree):
      if isinstance(node, ast.Import):
        for alias in node.names:
          yield [alias.name]
      elif isinstance(node, ast.ImportFrom):
        base = node.module or ''
        if node.level:
          parts = file.parent.parts[: len(file.parent.parts) - node.level + 1]
          base = '.'.join([*parts, base] if base else parts)
        for alias in node.names:
          yield [f'{base}.{alias.name}', base]
      elif isinstance(node, ast.Call) and (
        ast.unparse(node.func) in ('importlib.import_module', 'import_module')
      ):
        named = node.args[0] if node.args else None
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
          yield [named.value]

  def _deps(self, file: pathlib.Path) -> tuple[str, ...]:
    labels = set()
    for candidates in self._imports(file):
      found = next(filter(None, map(self._find, candidates)), None)
      top = candidates[-1].partition('.')[0]
      if found is not None:
        if found != file:
          labels.add(self._label(found, file.parent))
      elif top in ROOTS:
        self.unresolved.add(f'{file} imports {candidates[-1]}: no such file')
      elif top in EXTERNAL:
        labels.add(f'@pypi//{EXTERNAL[top]}')
      elif top not in sys.stdlib_module_names and top not in OPTIONAL:
        self.unresolved.add(
          f'{file} imports {top}: name its distribution in EXTERNAL or '
          'OPTIONAL of tools/generate_build_files.py'
        )
    return tuple(sorted(labels, key=_label_order))

  def targets(self, package: pathlib.Path) -> list[Target]:
    """The targets of one package: the package itself, then by name."""
    targets = []
    files = sorted(
      (file for file in self._files if file.parent == package),
      key=lambda file: (file.name != '__init__.py', file.name),
    )
    for file in files:
      tree = ast.parse((self._root / file).read_text(encoding='utf-8'))
      if file.stem.endswith('_test'):
        kind = 'py_test'
      elif any(map(_is_main_block, tree.body)) or file.stem == '__main__':
        kind = 'py_binary'
      else:
        kind = 'py_library'
      targets.append(
        Target(
          kind=kind,
          name=self.target_name(file),
          source=file.name,
          deps=self._deps(file),
          data=DATA.get(file.as_posix(), ()),
        )
      )
    return targets


def _list_attribute(name: str, values: tuple[str, ...]) -> list[str]:
  if not values:
    return []
  if len(values) == 1:
    return [f'    {name} = ["{values[0]}"],']
  return [f'    {name} = [', *(f'        "{v}",' for v in values), '    ],']


def _package_header(
  package: pathlib.Path, kinds: list[str], testonly: bool, public: bool
) -> list[str]:
  visibility = '//visibility:public' if public else '//:__subpackages__'
  lines = [
    f'load("@rules_python//python:{kind}.bzl", "{kind}")' for kind in kinds
  ]
  if lines:
    lines.append('')
  if testonly:
    lines += [
      'package(',
      '    default_testonly = True,',
      f'    default_visibility = ["{visibility}"],',
      ')',
    ]
  else:
    lines.append(f'package(default_visibility = ["{visibility}"])')
  return [*lines, '', 'licenses(["notice"])']


def render_package(project: Project, package: pathlib.Path) -> str:
  """The text of one package's BUILD file."""
  targets = project.targets(package)
  top = package.parts[0]
  lines = _package_header(
    package,
    sorted({target.kind for target in targets}),
    testonly=top == 'tests',
    public=top == 'tf_strategies',
  )
  for target in targets:
    lines += [
      '',
      f'{target.kind}(',
      f'    name = "{target.name}",',
      f'    srcs = ["{target.source}"],',
      *_list_attribute('data', target.data),
      *_list_attribute('deps', target.deps),
      ')',
    ]
  children = [
    f'//{child.as_posix()}:all_files'
    for child in project.packages()
    if child.parent == package
  ]
  lines += ['', *_all_files('["**"]', _GLOB_EXCLUDES, children)]
  return '\n'.join(lines) + '\n'


def render_top(project: Project) -> str:
  """The text of the BUILD file at the root."""
  children = [
    f'//{child.as_posix()}:all_files'
    for child in project.packages()
    if len(child.parts) == 1
  ]
  lines = [
    *_package_header(pathlib.Path('.'), [], testonly=False, public=True),
    '',
    'exports_files([',
    '    "LICENSE",',
    '    "pyproject.toml",',
    '    "setup.py",',
    '])',
    '',
    '# Everything, for the tests that read the sources.',
    *_all_files(
      '[\n        "*",\n        "docs/*",\n    ]', None, children, testonly=True
    ),
  ]
  return '\n'.join(lines) + '\n'


def _all_files(
  pattern: str,
  excludes: str | None,
  children: list[str],
  testonly: bool = False,
) -> list[str]:
  head = ['filegroup(', '    name = "all_files",']
  if testonly:
    head.append('    testonly = True,')
  if excludes is None:
    srcs = [f'    srcs = glob({pattern})']
  else:
    srcs = [
      '    srcs = glob(',
      f'        {pattern},',
      f'        exclude = {excludes},',
      '    )',
    ]
  if not children:
    return [*head, *srcs[:-1], srcs[-1] + ',', ')']
  return [
    *head,
    *srcs[:-1],
    srcs[-1] + ' + [',
    *(f'        "{child}",' for child in sorted(children, key=_label_order)),
    '    ],',
    ')',
  ]


def build_files(project: Project) -> dict[str, str]:
  """Returns the contents of every BUILD file, by its path in the project."""
  files = {'BUILD': render_top(project)}
  for package in project.packages():
    files[f'{package.as_posix()}/BUILD'] = render_package(project, package)
  return files


def main() -> None:
  """Writes or checks the BUILD files."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--check', action='store_true', help='write nothing')
  parser.add_argument(
    '--root',
    type=pathlib.Path,
    default=pathlib.Path(__file__).resolve().parent.parent,
  )
  arguments = parser.parse_args()
  project = Project(arguments.root)
  stale = []
  for name, text in build_files(project).items():
    path = arguments.root / name
    if path.exists() and path.read_text(encoding='utf-8') == text:
      continue
    stale.append(name)
    if not arguments.check:
      path.write_text(text, encoding='utf-8')
  verb = 'stale' if arguments.check else 'wrote'
  for name in stale:
    print(f'{verb}: {name}')
  for problem in sorted(project.unresolved):
    print(f'unresolved: {problem}')
  if project.unresolved or (arguments.check and stale):
    sys.exit(1)


if __name__ == '__main__':
  main()
