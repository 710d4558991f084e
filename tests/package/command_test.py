"""`tfs` dispatches to its commands, and reports invalid flags quickly."""

import contextlib
import io
import re

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tf_strategies import __main__ as tfs_command
from tf_strategies import version

# Some flags of each command.
_FLAGS = {
  'launch': ('--num_workers', '--nnodes', '--rendezvous'),
  'manifests': ('--image', '--kind'),
}
# Runs `python -m tf_strategies`, then prints the loaded modules.
_LOADED = """
import sys
from tf_strategies import __main__
try:
  status = __main__.main(['tfs', *sys.argv[1:]])
finally:
  loaded = {'tensorflow', 'keras', 'matplotlib'} & set(sys.modules)
print('status', status, 'loaded', sorted(loaded))
"""


def _run(*words):
  """Returns the status, stdout and stderr of a command run in this process."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = tfs_command.main(['tfs', *words])
  return status, out.getvalue(), err.getvalue()


class DispatchTest(parameterized.TestCase):
  def test_help_lists_every_command(self):
    status, out, _ = _run('--help')
    self.assertEqual(status, 0)
    shown = re.findall(r'^  (\w+)  ', out, re.MULTILINE)
    self.assertCountEqual(shown, _FLAGS)

  @parameterized.parameters(*_FLAGS.items())
  def test_command_help_lists_its_flags(self, name, flags):
    status, out, err = _run(name, '--help')
    self.assertEqual((status, err), (0, ''))
    for flag in flags:
      # Boolean flags also have a negation.
      self.assertRegex(out, rf'  {re.escape(flag)}\b')

  @parameterized.parameters(*_FLAGS)
  def test_misspelled_flag_suggests_the_correct_one(self, name):
    flag = _FLAGS[name][0]
    status, out, err = _run(name, f'{flag[:-1]}x=1')
    self.assertEqual((status, out), (2, ''))
    self.assertStartsWith(err, f'tfs {name}: Unknown command line flag')
    self.assertIn(f'Did you mean: {flag[2:]}', err)
    self.assertIn(f'Usage: tfs {name} [flags]', err)

  @parameterized.parameters(
    (
      ['lanch', '--num_workers=2'],
      "no command 'lanch'.*Did you mean: tfs launch",
    ),
    (['launch', '--restarts=1', '--', 'true'], 'Did you mean: max_restarts ?'),
    (['launch', '--nnodes=2', '--', 'true'], 'tfs launch: .*--rendezvous=None'),
    (['launch', '--node_rank=1', '--', 'true'], 'tfs launch: .*--nnodes=1'),
  )
  def test_invalid_arguments_are_explained(self, words, message):
    status, out, err = _run(*words)
    self.assertEqual((status, out), (2, ''))
    self.assertRegex(err, f'(?s){message}')
    self.assertLessEqual(err.count('Did you mean'), 1, err)

  @pytest.mark.smoke
  def test_version(self):
    self.assertEqual(
      _run('--version'), (0, f'tf_strategies {version.__version__}\n', '')
    )


class LoadedTest(parameterized.TestCase):
  @parameterized.parameters(
    *[[name, '--help'] for name in _FLAGS],
    ['launch', '--no_such_flag'],
  )
  def test_help_and_flag_errors_do_not_load_tensorflow(self, *words):
    done = processes.run_python('-c', _LOADED, *words, is_checked=True)
    last = done.stdout.splitlines()[-1]
    status = 0 if words[-1] == '--help' else 2
    self.assertEqual(last, f'status {status} loaded []')

  def test_python_m_runs_the_command(self):
    words = ['tf_strategies', 'launch', '--num_workers=1', '--', 'echo', 'here']
    done = processes.run_python('-m', *words)
    self.assertEqual((done.returncode, done.stderr), (0, ''))
    self.assertEqual(done.stdout, '[worker 0] here\n')
    done = processes.run_python('-m', 'tf_strategies', 'launch', '--', 'false')
    self.assertEqual(done.returncode, 1)


if __name__ == '__main__':
  absltest.main()
