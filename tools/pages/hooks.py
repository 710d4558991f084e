"""What MkDocs adds to docs/: pages that lie elsewhere, the API, drawn schedules.

Nothing is written twice: README.md is the first page, `tf_strategies._public` and the
rooms' `__all__` are the tables of the API pages, and those of measurements are the
reports in benchmarks/results. Links that are right in
the checkout are made right in the site.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import posixpath
import re

from tf_strategies.collectives import algorithms
from tools.pages import draw_schedule, measurements

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Files outside of docs/ that are pages of the site.
_PAGES = {
  'README.md': 'index.md',
  'examples/CLUSTERS.md': 'clusters.md',
  'benchmarks/README.md': 'benchmarks.md',
  'ARCHITECTURE.md': 'architecture.md',
  'CONTRIBUTING.md': 'contributing.md',
  'CHANGELOG.md': 'changelog.md',
}
# Packages with a page in the API reference, and the title of the page.
_ROOMS = {
  'strategies': 'Strategies and their options',
  'keras': 'Optimizers, layers and callbacks: tfs.keras',
  'fault_tolerance': 'Checkpoints, elastic jobs, preemption',
  'data': 'Input pipelines: tfs.data',
  'monitoring': 'Monitoring: tfs.monitoring',
  'cluster': 'Clusters: tfs.cluster',
  'cross_device': 'All-reduce between devices',
  'process_group': 'Between processes: tfs.process_group',
  'errors': 'Errors: tfs.errors',
}
_IMAGES = ('.png', '.svg')
_LINK = re.compile(r'(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)')
_SCHEDULE = re.compile(r'<!-- schedule: (\S+) (\d+) -->')
_FENCED = re.compile(r'(^```.*?^```$)', re.MULTILINE | re.DOTALL)


def on_files(files, config):
  """Adds pages and images that lie outside of docs/, and the API."""
  from mkdocs.structure import files as files_lib

  def add(uri: str, **options) -> None:
    files.append(files_lib.File.generated(config, uri, **options))

  for path, uri in _PAGES.items():
    add(uri, abs_src_path=str(_ROOT / path))
  for path in _ROOT.glob('benchmarks/*.png'):
    add(f'images/{path.name}', abs_src_path=str(path))
  for room in _ROOMS:
    add(f'api/{room}.md', content=api_page(room))
  return files


def on_page_markdown(markdown, page, config, files):
  """Makes links lead to pages of the site; draws schedules, writes tables."""
  del files
  uri = page.file.src_uri
  if '\n## ' not in markdown and not uri.startswith('api/'):
    page.meta['hide'] = ['toc']  # Room for a table that is the page.
  markdown = measurements.filled(markdown, _measured())
  markdown = links_of_site(markdown, uri, config.repo_url)
  return _SCHEDULE.sub(
    lambda m: draw_schedule.figure(algorithms.build(m[1], int(m[2]))), markdown
  )


@functools.cache
def _measured() -> dict[str, str]:
  return measurements.blocks(measurements.read(measurements.RESULTS))


def links_of_site(text: str, uri: str, repository: str | None) -> str:
  """The text of a page, with the links that it has in the site.

  Example:

    >>> links_of_site('[Limits](docs/limits.md#gpus)', 'index.md', None)
    '[Limits](limits.md#gpus)'
    >>> links_of_site('[it](../README.md), [a](../setup.py)', 'gpus.md', None)
    '[it](index.md), a'
    >>> links_of_site('[a](../setup.py)', 'gpus.md', 'https://x.org/r')
    '[a](https://x.org/r/blob/main/setup.py)'

  Args:
    text: Markdown with the links that are right in the checkout.
    uri: of the page, in the site.
    repository: where the checkout's files can be read; None for nowhere.
  """
  sources = {page: path for path, page in _PAGES.items()}
  directory = posixpath.dirname(sources.get(uri, f'docs/{uri}'))

  def replace(match: re.Match[str]) -> str:
    mark, label, link = match.groups()
    path, hash_, anchor = link.partition('#')
    if '://' in link or link.startswith('mailto:') or not path:
      return match[0]
    path = posixpath.normpath(posixpath.join(directory, path))
    if path in _PAGES:
      target = _PAGES[path]
    elif path.startswith('docs/'):
      target = path.removeprefix('docs/')
    elif path.endswith(_IMAGES):
      target = f'images/{posixpath.basename(path)}'
    else:
      if not repository:
        return label
      return f'[{label}]({repository.rstrip("/")}/blob/main/{path})'
    target = posixpath.relpath(target, posixpath.dirname(uri) or '.')
    return f'{mark}[{label}]({target}{hash_}{anchor})'

  pieces = _FENCED.split(text)
  pieces[::2] = [_LINK.sub(replace, piece) for piece in pieces[::2]]
  return ''.join(pieces)


def public_names(room: str) -> list[str]:
  """The full names of what a room offers: from the tables, without imports."""
  if room == 'errors':
    return ['tf_strategies.errors']
  names = {}
  package = f'tf_strategies.{room}'
  for module, name in _imports('_public'):
    if module == package or module.startswith(f'{package}.'):
      names[name] = f'{module}.{name}'
  if room in _imported_rooms():
    offered = _offered(f'{room}/__init__')
    for module, name in _imports(f'{room}/__init__'):
      if name in offered:
        names.setdefault(name, f'{module}.{name}')
  return [names[name] for name in sorted(names)]


def api_page(room: str) -> str:
  """Markdown with one reference for each name, for mkdocstrings."""
  lines = [f'# {_ROOMS[room]}', '']
  for name in public_names(room):
    lines.append(f'::: {name}')
    if (_ROOT / f'{name.replace(".", "/")}.py').exists() and room != 'errors':
      # A module that is a public name.
      lines += ['    options:', '      members: [run]', '']
      lines += [f'::: {name}_job.Job', '    options:']
      # Without `run`, which `tfs.elastic.run` calls.
      lines += ['      members: [strategy, position, restore, update, fit]']
    lines.append('')
  return '\n'.join(lines)


def _body(path: str) -> list[ast.stmt]:
  text = (_ROOT / 'tf_strategies' / f'{path}.py').read_text(encoding='utf-8')
  return ast.parse(text).body


def _offered(path: str) -> list[str]:
  [names] = [
    ast.literal_eval(node.value)
    for node in _body(path)
    if isinstance(node, ast.Assign)
    and ast.unparse(node.targets[0]) == '__all__'
  ]
  return names


def _imports(path: str) -> list[tuple[str, str]]:
  return [
    (node.module, alias.name)
    for node in _body(path)
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
    if node.module.startswith('tf_strategies')
  ]


def _imported_rooms() -> set[str]:
  return {
    name for module, name in _imports('_public') if module == 'tf_strategies'
  }
