"""The programs in the README and the tutorial give the documented results."""

import ast
import os
import pathlib
import re
import signal
import sys

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests.architecture import documents, project

# Later digits depend on the kind of CPU.
_DECIMALS = 3
_LOSS = re.compile(r'(?:loss )?(\d\.\d+)(?: of)? (\d)$', re.MULTILINE)


def _page(path: str) -> str:
  return project.text_files()[path]


class PageTest(parameterized.TestCase):
  """Base class that creates the files of a page and runs its commands."""

  page = 'README.md'

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir())
    for block in documents.blocks(_page(self.page), 'python'):
      if block.title:
        (self.directory / block.title).write_text(block.body, encoding='utf-8')

  def commands(self, program: str) -> list[list[str]]:
    """Returns the page's commands that end in a program, for this interpreter."""
    known = {
      'python': [sys.executable],
      'tfs': [sys.executable, '-m', 'tf_strategies'],
    }
    return [
      [new for word in words for new in known.get(word, [word])]
      for words in documents.commands(_page(self.page))
      if words[-1] == program and '--nnodes=2' not in words
    ]

  def output_of(self, words: list[str]) -> str:
    return processes.run(
      words,
      cwd=self.directory,
      env=processes.python_environment(),
      is_checked=True,
    ).stdout

  def losses(self, text: str) -> list[tuple[float, int]]:
    """Returns the printed losses, each with the number of replicas."""
    return [(float(loss), int(n)) for loss, n in _LOSS.findall(text)]

  def assert_documented_losses(self, program: str):
    """Checks that the outputs of the commands equal those of the page and one device."""
    found = []
    for command in self.commands(program):
      found += self.losses(self.output_of(command))
    shown = []
    for block in documents.blocks(_page(self.page), 'text'):
      shown += self.losses(block.body)
    self.assertGreater(len(found), 1)
    for (loss, replicas), (documented, count) in zip(
      found, shown, strict=False
    ):
      self.assertEqual(replicas, count)
      self.assertAlmostEqual(loss, documented, places=_DECIMALS)
      self.assertAlmostEqual(loss, found[0][0], delta=1.1e-4)


class ReadmeTest(PageTest):
  @pytest.mark.soak
  def test_commands_print_the_documented_losses(self):
    self.assert_documented_losses('train.py')

  def test_every_diff_results_in_the_program(self):
    (program,) = documents.blocks(_page(self.page), 'python')
    diffs = list(documents.blocks(_page(self.page), 'diff'))
    self.assertLen(diffs, 1)
    for diff in diffs:
      lines = diff.body.splitlines()
      after = '\n'.join(line[1:] for line in lines if line[:1] != '-')
      before = '\n'.join(line[1:] for line in lines if line[:1] != '+')
      with self.subTest(diff.body):
        self.assertIn(after, program.body)
        ast.parse(program.body.replace(after, before))


class TutorialTest(PageTest):
  page = 'docs/tutorial.md'

  def test_two_workers_print_the_losses_of_one(self):
    self.assertLen(self.commands('digits.py'), 2)
    self.assert_documented_losses('digits.py')

  def test_killed_worker_rejoins(self):
    text = (self.directory / 'survivor.py').read_text(encoding='utf-8')
    self.assertIn('time.sleep(0.5)', text)  # This program is not killed.
    text = text.replace('time.sleep(0.5)', 'pass')
    alone = self.losses(self.output_of([sys.executable, '-c', text]))
    (words,) = self.commands('survivor.py')
    with processes.Command(
      words, cwd=self.directory, env=processes.python_environment()
    ) as job:
      job.wait_until(lambda: ' of 2' in job.output())
      victim = re.search(r'\[worker 1\] I am process (\d+)', job.output())[1]
      os.kill(int(victim), signal.SIGKILL)
      self.assertEqual(job.wait(), 0, job.output())
    first = [
      line
      for line in job.output().splitlines()
      if line.startswith('[worker 0]')
    ]
    first = '\n'.join(first)
    # While the killed worker is away, and after its return.
    for count in (1, 2):
      self.assertRegex(
        first, rf'Generation \d+ goes on at .*; workers: {count}'
      )
    printed = self.losses(first)
    self.assertLen(printed, 100)
    replicas = [n for _, n in printed]
    self.assertEqual([*sorted(set(replicas)), replicas[-1]], [1, 2, 2])
    for (loss, _), (expected, _) in zip(printed, alone, strict=True):
      self.assertAlmostEqual(loss, expected, places=5)


if __name__ == '__main__':
  absltest.main()
