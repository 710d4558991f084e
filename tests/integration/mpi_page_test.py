"""docs/mpi.md: its command gives the same results on two workers as on one."""

import importlib.util
import os
import pathlib
import re
import shutil
import sys
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests.architecture import documents, project
from tf_strategies.cluster import workers

_PATH = os.pathsep.join(
  [os.path.dirname(sys.executable), os.environ.get('PATH', '')]
)


class MpiPageTest(parameterized.TestCase):
  @pytest.mark.soak
  def test_command_prints_the_losses_of_the_page(self):
    mpirun = shutil.which('mpirun', path=_PATH)
    if mpirun is None or importlib.util.find_spec('mpi4py') is None:
      self.skipTest("no mpirun or mpi4py: pip install '.[mpi]'")
    text, readme = (
      project.text_files()[page] for page in ('docs/mpi.md', 'README.md')
    )
    [command] = (w for w in documents.commands(text) if w[0] == 'mpirun')
    program = next(documents.blocks(readme, 'python'))
    directory = pathlib.Path(self.create_tempdir())
    (directory / program.title).write_text(program.body, encoding='utf-8')
    given = {'mpirun': mpirun, 'python': sys.executable}
    done = processes.run(
      [given.get(word, word) for word in command],
      env=processes.python_environment(),
      cwd=directory,
      is_checked=True,
    )
    shown = next(documents.blocks(text, 'text')).body
    alone = re.search(r'^(\d\.\d+) 1$', readme, re.M)[1]
    for output in (shown, done.stdout):
      losses = re.findall(r'^(\d\.\d+) 2$', output, re.M)
      self.assertLen(losses, 2, output)
      for loss in losses:
        self.assertAlmostEqual(float(loss), float(alone), delta=1.1e-4)

  @parameterized.parameters(
    ({}, False),
    ({'PMI_SIZE': '2'}, True),
    ({'OMPI_COMM_WORLD_SIZE': '3'}, True),
    ({'PMI_SIZE': '1'}, False),
    ({'PMI_SIZE': ''}, False),
    ({'PMI_SIZE': '2', 'TF_CONFIG': '{}'}, False),
  )
  def test_mpi_worker_is_detected(self, environ, expected):
    with mock.patch.dict(os.environ, environ, clear=True):
      self.assertEqual(workers.is_of_mpi(), expected)


if __name__ == '__main__':
  absltest.main()
