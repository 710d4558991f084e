"""Programs of pages that need packages which the tests do without."""

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
  """Writes a program of a page into a new directory, and returns its path.

  Args:
    test: skipped where a package is missing.
    page: path of the document.
    title: of the block.
    packages: what the program imports beside ours.
    changes: pairs of what is in the program and what stands there instead.
  """
  for name in packages:
    if importlib.util.find_spec(name) is None:
      test.skipTest(f'no {name}: pip install {name}')
  blocks = documents.blocks(project.text_files()[page], 'python')
  [program] = [block.body for block in blocks if block.title == title]
  for before, after in changes:
    test.assertEqual(program.count(before), 1, before)
    program = program.replace(before, after)
  path = pathlib.Path(test.create_tempdir().full_path, title)
  path.write_text(program, encoding='utf-8')
  return path


def run(
  program: pathlib.Path,
  *arguments: str,
  launch: Sequence[str] = ('--num_workers=2',),
  env: dict[str, str] | None = None,
) -> str:
  """What a program has said: alone, or as all tasks of a job."""
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
