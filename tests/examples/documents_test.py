"""Every Python block in the documents runs and gives the documented results."""

import doctest
import os
import pathlib
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from benchmarks import processes
from tests import virtual_devices
from tests.architecture import documents, project
from tests.programs import common

virtual_devices.configure(4)

_DOCTEST = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
# The blocks of this page are fragments of test files.
_NOT_RUN = ('CONTRIBUTING.md',)
# tutorial_test.py runs the first two. Tests in integration/ run the others if
# their requirements are installed.
_RUN_ELSEWHERE = (
  'README.md',
  'docs/tutorial.md',
  'docs/ray.md',
  'docs/spark.md',
  'docs/callbacks.md',
  'docs/data_sources.md',
  'docs/object_stores.md',
)


def _checkpoints():
  """Returns the variables that the page assumes."""
  model = common.linear(3, 1)
  model.compile('sgd', 'mse')
  options = tfs.data.PipelineOptions(global_batch_size=4, seed=1)
  arrays = np.ones([400, 3]), np.ones([400, 1])

  def batches_from(epoch, step):
    return tfs.data.make_dataset(
      arrays, options, training=True, epochs=3, start=(epoch, step)
    )

  return {
    'tfs': tfs,
    'directory': tempfile.mkdtemp(),
    'model': model,
    'optimizer': model.optimizer,
    'metrics': [keras.metrics.Mean()],
    'batches_from': batches_from,
    'train_step': lambda batch: model.train_on_batch(*batch),
    'evaluate': lambda: None,
  }


def _parameter_servers():
  ids = tf.reshape(tf.range(32, dtype=tf.int64) * 10**12, [32, 1])
  clicks = tf.cast(ids % 3 == 0, tf.float32)
  return {'dataset': tf.data.Dataset.from_tensors((ids, clicks))}


_GIVEN = {
  'docs/checkpoints.md': _checkpoints,
  'docs/parameter_servers.md': _parameter_servers,
}


def _pages(*languages):
  return [
    path
    for path, text in sorted(project.text_files().items())
    if path.endswith('.md')
    and path not in _NOT_RUN
    and any(documents.blocks(text, *languages))
  ]


def _blocks(page, *languages):
  return list(documents.blocks(project.text_files()[page], *languages))


class DocumentsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(self.create_tempdir().full_path)

  def test_pages_are_found(self):
    self.assertContainsSubset(
      {'docs/elastic.md', 'docs/migration.md', *_RUN_ELSEWHERE},
      _pages('python'),
    )
    self.assertContainsSubset(_GIVEN, _pages('python'))

  @parameterized.parameters(*_pages('pycon'))
  @pytest.mark.smoke
  def test_sessions_give_the_documented_output(self, page):
    body = ''.join(block.body + '\n' for block in _blocks(page, 'pycon'))
    session = doctest.DocTestParser().get_doctest(body, {}, page, page, 0)
    runner = doctest.DocTestRunner(optionflags=_DOCTEST)
    self.assertEqual(runner.run(session).failed, 0)
    self.assertNotEmpty(session.examples)

  @parameterized.parameters(
    *(page for page in _pages('python') if page not in _RUN_ELSEWHERE)
  )
  def test_programs_run(self, page):
    for block in _blocks(page, 'python', 'diff'):
      given = _GIVEN.get(page, dict)()
      program = block.body
      if block.language == 'diff':  # Runs the result of the diff.
        lines = program.splitlines()
        program = '\n'.join(line[1:] for line in lines if line[:1] != '-')
      with self.subTest(program):
        if "__name__ == '__main__'" in program:
          # Workers read the functions of a program from its file.
          pathlib.Path('program.py').write_text(program, encoding='utf-8')
          processes.run(
            [sys.executable, 'program.py'],
            env=processes.python_environment(),
            is_checked=True,
          )
          continue
        exec(compile(program, page, 'exec'), {'__name__': '__main__', **given})
    self.assertNotEmpty(_blocks(page, 'python'))

  @pytest.mark.smoke
  def test_every_error_type_is_documented(self):
    text = project.text_files()['docs/errors.md']
    types = {
      name
      for name, value in vars(tfs.errors).items()
      if isinstance(value, type) and issubclass(value, tfs.errors.Error)
    }
    named = {line[3:] for line in text.splitlines() if line.startswith('## ')}
    self.assertEqual(types - named, {'Error'})


if __name__ == '__main__':
  absltest.main()
