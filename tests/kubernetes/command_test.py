"""`python -m tf_strategies.kubernetes` works as a user calls it."""

import contextlib
import importlib.util
import io
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies import kubernetes

_JOB = ['--num_workers=2', '--num_ps=1', '--image=mnist:1', '--name=mnist']
_COMMAND = ['--', 'python', 'train.py', '--', '--epochs=2']
_needs_yaml = pytest.mark.skipif(
  importlib.util.find_spec('yaml') is None, reason='PyYAML is missing'
)


def _run(*arguments):
  """Returns the exit status, stdout and stderr of the command."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = kubernetes.main(['kubernetes', *arguments])
  return status, out.getvalue(), err.getvalue()


def _documents(text):
  import yaml

  return list(yaml.safe_load_all(text))


@_needs_yaml
class WriteTest(parameterized.TestCase):
  @parameterized.parameters(('tfjob', 'TFJob'), ('jobset', 'JobSet'))
  def test_yaml_is_what_was_asked_for(self, kind, name):
    status, out, err = _run(*_JOB, f'--kind={kind}', *_COMMAND)
    self.assertEqual((status, err), (0, ''))
    secret, job = _documents(out)
    self.assertEqual((secret['kind'], job['kind']), ('Secret', name))
    self.assertEqual(job['metadata'], {'name': 'mnist'})
    self.assertIn('out of version control', out.splitlines()[0])
    # YAML would write a list that two pods share as an anchor.
    self.assertNotIn('&id', out)
    self.assertIn('- --epochs=2\n', out)

  def test_secret_that_exists_is_not_written(self):
    status, out, _ = _run(*_JOB, '--secret_name=ours', *_COMMAND)
    self.assertEqual(status, 0)
    self.assertLen(_documents(out), 1)
    self.assertNotIn('version control', out)

  @pytest.mark.smoke
  def test_runs_as_a_module(self):
    done = processes.run_python(
      *('-m', 'tf_strategies.kubernetes', *_JOB, *_COMMAND), is_checked=True
    )
    self.assertEqual(_documents(done.stdout)[1]['kind'], 'JobSet')


class CommandLineTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('no_image', ['--', 'true'], 'no --image'),
    ('no_command', _JOB, 'an empty command'),
    ('kind', [*_JOB, '--kind=pod', '--', 'true'], '--kind=pod'),
  )
  @_needs_yaml
  def test_wrong_command_line_is_explained(self, arguments, words):
    status, out, err = _run(*arguments)
    self.assertEqual((status, out), (2, ''))
    self.assertIn(words, err)
    self.assertIn('Usage: kubernetes', err)

  def test_without_yaml_the_extra_is_named(self):
    with mock.patch.object(importlib.util, 'find_spec', return_value=None):
      status, out, err = _run(*_JOB, *_COMMAND)
    self.assertEqual((status, out), (2, ''))
    self.assertIn("'.[manifests]'", err)


if __name__ == '__main__':
  absltest.main()
