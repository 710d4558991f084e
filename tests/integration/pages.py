"""Runs programs of pages; they need packages that the tests do not need."""

import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from absl.testing import absltest

from benchmarks import processes
from tests.architecture import documents, project


def write(
  test: absltest.TestCase,
  page: str,
  title: str,
  packages: Sequence[str] = (),
  changes: Sequence[tuple[str, str]] = (),
) -> pathlib.Path:
  """Writes a page's program into a new directory and returns its path.

  Args:
    test: the test, which is skipped if a package is missing.
    page: path of the document.
    title: title of the block.
    packages: additional packages that the program imports.
    changes: pairs of a text in the program and its replacement.
  """
  for name in packages:
    if importlib.util.find_spec(name) is None:
      test.skipTest(f'no {name}: pip install {name}')
  blocks = documents.blocks(project.text_files()[page], 'python')
  [program] = [block.body for block in blocks if block.title == title]
  for before, after in changes:
    test.assertEqual(program.count(before), 1, before)
    program = program.replace(before, after)
  path = pathlib.Path(test.create_tempdir(), title)
  path.write_text(program, encoding='utf-8')
  return path


def run(
  program: pathlib.Path,
  *arguments: str,
  launch: Sequence[str] = ('--num_workers=2',),
  env: dict[str, str] | None = None,
) -> str:
  """Runs a program alone, or as all tasks of a job, and returns its output."""
  words = [sys.executable, program.name, *arguments]
  if launch:
    launcher = [sys.executable, '-m', 'tf_strategies.launch']
    words = [*launcher, *launch, '--', *words]
  done = processes.run(
    words,
    env=processes.python_environment(env),
    cwd=program.parent,
    is_checked=True,
  )
  return done.stdout + done.stderr
