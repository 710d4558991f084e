"""`tfs.launch(function)`: calls on workers, their results and their errors."""

import os
import pathlib
import re
import signal
import sys
import time
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from benchmarks import processes
from tests import tiers
from tests.launch import programs
from tests.processes import wait_until
from tf_strategies import errors
from tf_strategies.cluster import ClusterConfig, launcher_note
from tf_strategies.launch import functions

_SCRIPT = """
import os, sys, time
import tf_strategies as tfs

def work(factor):
  index = tfs.cluster.ClusterConfig.from_env().training_index
  os.write(1, f'\N{CHECK MARK} working on {index}\\n'.encode())
  return factor * index

def wait(directory):
  path = os.path.join(directory, str(os.getpid()))
  open(path, 'w').close()
  time.sleep(600)

if __name__ == '__main__':
  if sys.argv[2] == 'work':
    print(tfs.launch(work, args=(10,), num_workers=3))
  else:
    tfs.launch(wait, args=(sys.argv[1],), grace_period=2)
"""


_UNGUARDED = """
import tf_strategies as tfs

def work():
  return 7

print(tfs.launch(work, num_workers=1))
"""

_CLASSES = """
import dataclasses
import tf_strategies as tfs

@dataclasses.dataclass
class Result:
  number: int

class Mistake(Exception):
  pass

class Stubborn:
  def __reduce__(self):
    return int, ('seven',)

def fail():
  raise Mistake('why')

if __name__ == '__main__':
  print('found', tfs.launch(Result, (3,), num_workers=2))
  for function in (fail, Stubborn):
    try:
      tfs.launch(function, num_workers=1)
    except tfs.errors.WorkerUnavailableError as e:
      print('found', repr(e.__cause__ or e))
"""

_OF_A_PACKAGE = """
import tf_strategies as tfs
from . import helper

def work():
  return helper.NUMBER

if __name__ == '__main__':
  print(tfs.launch(work, num_workers=2))
"""


def _place(offset):
  """Returns the argument and the index of a worker."""
  config = ClusterConfig.from_env()
  return np.float32([offset, config.training_index])


def _leave():
  os._exit(0)


class _UnreadableError(Exception):
  """Cannot be made from its `args`, as pickle does."""

  def __init__(self, text, more):
    super().__init__(text)
    self.more = more


def _survive():
  launcher_note.say(launcher_note.ELASTIC)
  if ClusterConfig.from_env().training_index == 1:
    time.sleep(2)  # The others have said so too.
    raise _UnreadableError('lost', 'first')
  time.sleep(4)
  return 'alive'


def _serve():
  if ClusterConfig.from_env().task_type == 'chief':
    return 'chief'
  time.sleep(600)
  return 'server'


def _fail(what):
  if ClusterConfig.from_env().training_index == 1:
    raise KeyError(what)
  return 1


class FunctionsTest(parameterized.TestCase):
  def test_function_of_a_function_is_sent_whole(self):
    self.assertTrue(functions.importlib.util.find_spec('cloudpickle'))
    secret = 7
    found = tfs.launch(lambda: secret * 2, num_workers=1)
    self.assertEqual(found, [14])

  def test_without_cloudpickle(self):
    with (
      mock.patch.object(
        functions.importlib.util, 'find_spec', lambda name: None
      ),
      self.assertRaisesRegex(
        errors.UnsupportedOptionError, r"pip install '.\[notebook\]'"
      ),
    ):
      tfs.launch(lambda: 1)

  def test_argument_that_cannot_be_sent(self):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, '_place'):
      tfs.launch(_place, args=(sys.stdout,))

  @parameterized.parameters(
    (_place, {'num_worker': 2}, "'num_worker' of tfs.launch.*'num_workers'"),
    (_place, {'max_restarts': -1}, 'max_restarts=-1'),
    (_place, {'num_workers': 0}, '^Expected .*--num_workers=0 without --chief.*Fix: [^\n]*$'),
    (_place, {'num_workers': 10**20}, r'^Expected at most 12000 tasks on one host, got 10{20}\.'),
    (_place, {'grace_period': float('nan')}, 'grace_period=nan'),
    (_place, {'log_dir': 3}, 'a path, got log_dir=3'),
    (_place, {'log_dir': '/proc/none'}, '^Expected .*--log_dir=/proc/none'),
    (_place, {'rank_filter': 'ps'}, '^Expected .*--rank_filter=ps'),
    (_place, {'args': 3}, r'args of type int.*write args=\(value,\)'),
    ('_place', {}, "function='_place'.*pass the function itself"),
  )  # fmt: skip
  def test_wrong_argument(self, function, options, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.launch(function, **{'args': (5,), **options})

  @pytest.mark.smoke
  def test_results_of_all_workers_with_values_of_numpy_and_pathlib(self):
    directory = pathlib.Path(self.create_tempdir().full_path, 'logs')
    found = tfs.launch(
      _place,
      args=(5,),
      num_workers=np.int64(2),
      grace_period=np.float32(2),
      evaluator=np.False_,
      log_dir=directory,
      rank_filter=None,
    )
    np.testing.assert_array_equal(found, [[5, 0], [5, 1]])
    self.assertNotEmpty(list(directory.iterdir()))

  @parameterized.parameters(
    # Worker 0 is the one that the launcher ends.
    (_serve, {'num_workers': 1, 'num_ps': 1, 'chief': True}, ['chief']),
    # A lost worker of an elastic job returns nothing.
    (_survive, {'num_workers': 3}, ['alive', None, 'alive']),
    (sys.exit, {'num_workers': 2}, [None, None]),
    (_leave, {'num_workers': 1}, [None]),
  )
  def test_who_returns_nothing(self, function, options, expected):
    self.assertEqual(tfs.launch(function, **options), expected)

  def test_error_of_a_worker(self):
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, r'worker 1 failed first'
    ) as caught:
      tfs.launch(_fail, args=('the key',))
    self.assertIsInstance(caught.exception.__cause__, KeyError)
    self.assertIn('the key', str(caught.exception))

  def run_script(self, text, *words, **options):
    path = self.create_tempfile('script.py', text).full_path
    return processes.run_python(path, *words, **options)

  def test_script(self):
    env = {'PYTHONIOENCODING': 'ascii'}
    done = self.run_script(_SCRIPT, 'x', 'work', env=env, is_checked=True)
    *lines, last = done.stdout.splitlines()
    self.assertEqual(last, '[0, 10, 20]')
    self.assertCountEqual(
      lines, [f'[worker {i}] ? working on {i}' for i in range(3)]
    )

  def test_classes_of_a_script(self):
    done = self.run_script(_CLASSES, is_checked=True)
    found = re.findall('^found (.*)', done.stdout, re.MULTILINE)
    results, cause, message = found
    self.assertEqual(results, '[Result(number=3), Result(number=3)]')
    self.assertEqual(cause, "Mistake('why')")
    self.assertRegex(
      message,
      "^WorkerUnavailableError.*rank 0 ret.*'seven'.*Fix: return numbers",
    )

  def test_script_without_a_main_block(self):
    done = self.run_script(_UNGUARDED)
    self.assertNotEqual(done.returncode, 0)
    self.assertRegex(done.stderr, 'Fix: call tfs.launch under: if __name__ ==')

  def test_module_run_by_name(self):
    home = pathlib.Path(self.create_tempdir().full_path)
    (home / 'pack').mkdir()
    (home / 'pack/__init__.py').touch()
    (home / 'pack/helper.py').write_text('NUMBER = 5')
    (home / 'pack/program.py').write_text(_OF_A_PACKAGE)
    program = f'import runpy, sys; sys.path.insert(0, {str(home)!r});'
    program += "runpy.run_module('pack.program', None, '__main__', True)"
    done = processes.run_python('-c', program, is_checked=True)
    self.assertEqual(done.stdout.splitlines()[-1], '[5, 5]')

  @tiers.parameters(signal.SIGINT, tiers.soak(signal.SIGKILL))
  def test_end_of_the_caller_ends_the_workers(self, number):
    path = self.create_tempfile('script.py', _SCRIPT).full_path
    notes = self.create_tempdir().full_path
    words = [sys.executable, path, notes, 'wait']
    env = processes.python_environment()
    with processes.Command(words, env=env, deadline_seconds=60) as command:
      command.wait_until(lambda: len(os.listdir(notes)) == 2)
      pids = [int(name) for name in os.listdir(notes)]
      command.signal(number)
      command.wait()
      said = command.output()
      wait_until(lambda: not any(map(programs.is_running, pids)), 30)
    if number == signal.SIGINT:
      self.assertEqual(said.count('Traceback'), 1)  # The caller's own.
      self.assertIn('[launch] SIGINT', said)


if __name__ == '__main__':
  absltest.main()
