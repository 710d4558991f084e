"""Commands in documents use targets, modules, flags and extras that exist."""

import re
import shlex

import pytest
from absl.testing import absltest, parameterized

from tests.architecture import documents, project

pytestmark = pytest.mark.smoke

_LINK = re.compile(r'\]\(([^)#]+)(?:#[^)]*)?\)')
_DEFINED_FLAG = re.compile(r"DEFINE_\w+\(\s*'(\w+)'")
_ARGUMENT = re.compile(r"add_argument\(\s*'--([\w-]+)'")
# Flags that are fields of an options class: see `tf_strategies.cluster.command_line`.
_FIELD = re.compile(r'^  (\w+): [^\n=]+ = command_line\.option\(', re.MULTILINE)


def _documents(files: dict[str, str]) -> list[str]:
  return [path for path in files if path.endswith('.md')]


def _flags(files: dict[str, str]) -> set[str]:
  defined = set()
  for path, text in files.items():
    if path.endswith('.py'):
      defined.update(_DEFINED_FLAG.findall(text))
      defined.update(_ARGUMENT.findall(text))
      defined.update(_FIELD.findall(text))
  return defined


def _script_problem(words: list[str], files: dict[str, str]) -> str | None:
  """Returns the problem with `python <file>` or `python -m <module>`, if any."""
  if words[1:2] == ['-m'] and len(words) > 2:
    path = words[2].replace('.', '/')
    if path.split('/')[0] not in project.PYTHON_ROOTS:
      return None
    candidates = (f'{path}.py', f'{path}/__main__.py')
  elif len(words) > 1 and words[1].endswith('.py'):
    candidates = (words[1],)
  else:
    return None
  if not any(candidate in files for candidate in candidates):
    return f'no file {candidates[0]}'
  return _flag_problem(words[2:], files)


def _flag_problem(words: list[str], files: dict[str, str]) -> str | None:
  """Returns the first flag that is not defined, if any."""
  defined = _flags(files)
  for word in words:
    flag = re.match(r'--(?:no(?=\w))?([\w-]+)', word)
    whole = re.match(r'--([\w-]+)', word)
    if flag and not {flag.group(1), whole.group(1)} & defined:
      return f'no flag --{whole.group(1)}'
  return None


def _extras(files: dict[str, str]) -> set[str]:
  return set(
    re.findall(r"^    '([\w-]+)': [\[_]", files['setup.py'], re.MULTILINE)
  )


def _tfs_problem(words: list[str], files: dict[str, str]) -> str | None:
  """Returns the problem with `tfs <command>`, if any."""
  door = files.get('tf_strategies/__main__.py', '')
  commands = re.findall(r"^  '([a-z]+)': \($", door, re.MULTILINE)
  if words[1] in commands:
    return _flag_problem(words[2:], files)
  return f'no command {" ".join(words[:2])}'


def _problems(text: str, files: dict[str, str]) -> list[str]:
  """Returns a document's commands that do not exist, each with the reason."""
  targets = set(re.findall(r'^([\w-]+):', files['Makefile'], re.MULTILINE))
  extras = _extras(files)
  found = []
  titles = {block.title for block in documents.blocks(text, 'python')}
  for words in documents.commands(text):
    reason = None
    if words[0] == 'make':
      unknown = {
        word
        for word in words[1:]
        if not word.startswith('-') and '=' not in word and word not in targets
      }
      if unknown:
        reason = f'no target {sorted(unknown)}'
    elif words[0].startswith('python'):
      if words[1:2] and words[1] in titles:
        continue  # The reader creates it from a block above.
      reason = _script_problem(words, files)
    elif words[0] == 'tfs':
      reason = _tfs_problem(words, files)
    if 'install' in words:
      for word in words:
        named = re.fullmatch(
          r'(?:\.|tf_strategies|tf-strategies)\[(.*)\]', word
        )
        unknown = set(named.group(1).split(',')) - extras if named else set()
        if unknown:
          reason = f'no extra {sorted(unknown)}'
    if reason:
      found.append(f'{shlex.join(words)}: {reason}')
  return found


_INSTALL = re.compile(r"pip install '?([\w.]*)\[([\w,-]+)\]")


class ReadmeTest(parameterized.TestCase):
  def test_install_hints_name_existing_extras(self):
    files = project.text_files()
    extras = _extras(files)
    found = 0
    for path, text in files.items():
      top = path.partition('/')[0]
      if top not in ('tf_strategies', 'benchmarks', 'examples'):
        continue
      for package, named in _INSTALL.findall(text):
        with self.subTest(path):
          found += 1
          # The project is not on a package index.
          self.assertEqual(package, '.')
          self.assertContainsSubset(named.split(','), extras)
    self.assertGreater(found, 5)

  def test_documented_commands_exist(self):
    files = project.text_files()
    for document in _documents(files):
      with self.subTest(document):
        found = _problems(files[document], files)
        self.assertEmpty(found, '\n'.join(found))

  def test_linked_files_exist(self):
    files, found = project.text_files(), 0
    for document in _documents(files):
      directory = (project.root() / document).parent
      for link in _LINK.findall(files[document]):
        if '://' not in link:
          with self.subTest(document):
            found += 1
            self.assertTrue((directory / link).exists(), link)
    self.assertGreater(found, 10)

  @parameterized.parameters(
    ('README.md', 6000), ('CONTRIBUTING.md', 6000), ('ARCHITECTURE.md', 15_000)
  )
  def test_document_is_short(self, name, most):
    self.assertLessEqual((project.root() / name).stat().st_size, most)


if __name__ == '__main__':
  absltest.main()
