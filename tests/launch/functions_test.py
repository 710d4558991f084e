"""`tfs.launch(function)`: calls on workers, their results and their errors."""

import os
import pathlib
import re
import signal
import sys
import time
import types
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from benchmarks import processes
from tests.launch import programs
from tf_strategies import errors
from tf_strategies.cluster import ClusterConfig, launcher_note
from tf_strategies.launch import command, functions

pytestmark = pytest.mark.multi_process

_SCRIPT = """
import os, sys, time
import tf_strategies as tfs

def work(factor):
  index = tfs.cluster.ClusterConfig.from_env().training_index
  print('working on', index)
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
  """What a worker is told, and who it is."""
  config = ClusterConfig.from_env()
  return np.float32([offset, config.training_index])


def _leave(rank):
  if ClusterConfig.from_env().training_index == rank:
    os._exit(0)


def _serve():
  if ClusterConfig.from_env().task_type == 'chief':
    return 'chief'
  time.sleep(600)
  return 'server'


def _fail(what):
  if ClusterConfig.from_env().training_index == 1:
    raise KeyError(what)
  return 1


class NoteTest(absltest.TestCase):
  def test_fixed_strategy_says_that_the_job_is_not_elastic(self):
    with launcher_note.Note() as note:
      variable = {launcher_note.VARIABLE: note.path}
      with mock.patch.dict(os.environ, variable):
        tfs.MultiWorkerRingStrategy().close()
        self.assertEmpty(note.newly_trained())
        self.assertEqual(note.kind, launcher_note.FIXED)
        # A program may train with both.
        launcher_note.say_elastic()
        launcher_note.say_fixed()
        launcher_note.say_trained('worker 1')
      self.assertEqual(note.newly_trained(), ['worker 1'])
      self.assertEqual(note.kind, launcher_note.ELASTIC)


class FunctionsTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_results_are_those_of_all_workers(self):
    found = tfs.launch(_place, args=(5,), num_workers=2)
    np.testing.assert_array_equal(found, [[5, 0], [5, 1]])

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
    (_place, {'max_restart': 1}, "write 'max_restarts'"),
    (_place, {'num_workers': '2'}, "num_workers='2'.*an integer"),
    (_place, {'num_workers': True}, 'num_workers=True'),
    (_place, {'num_workers': -1}, 'num_workers=-1.*at least 0'),
    (_place, {'num_workers': None}, 'num_workers=None'),
    (_place, {'max_restarts': 1.5}, 'max_restarts=1.5'),
    (_place, {'chief': 1}, 'chief=1.*True or False'),
    (_place, {'grace_period': '2'}, "grace_period='2'.*seconds"),
    (_place, {'rendezvous_timeout': float('nan')}, 'rendezvous_timeout=nan'),
    (_place, {'log_dir': 3}, 'log_dir=3.*a path'),
    (_place, {'rank_filter': 0}, 'rank_filter=0.*a string'),
    (_place, {'args': 3}, r'args of type int .*write args=\(value,\)'),
    (_place, {'args': 'ab'}, 'args of type str'),
    ('_place', {}, "function='_place'.*pass the function itself"),
  )
  def test_wrong_argument(self, function, options, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.launch(function, **options)

  @parameterized.parameters(
    ({'num_workers': 0}, '^--num_workers=0 without --chief.*Fix: [^\n]*$'),
    ({'rank_filter': 'ps'}, '^--rank_filter=ps'),
    ({'tee': False}, '^--notee without --log_dir'),
    ({'log_dir': '/proc/none'}, '^--log_dir=/proc/none'),
    ({'nnodes': 2}, '^--nnodes=2 without --rendezvous'),
    ({'num_workers': 10**20}, '^1(0{20}) tasks on one host.*at most 12000'),
  )
  def test_what_the_launcher_refuses_is_no_dead_worker(self, options, message):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, message):
      tfs.launch(_place, args=(5,), **options)

  def test_values_as_numpy_and_pathlib_have_them(self):
    directory = pathlib.Path(self.create_tempdir().full_path, 'logs')
    found = tfs.launch(
      _place,
      args=(5,),
      num_workers=np.int64(2),
      grace_period=np.float32(2),
      tee=np.True_,
      log_dir=directory,
      rank_filter=None,
    )
    np.testing.assert_array_equal(found, [[5, 0], [5, 1]])
    self.assertNotEmpty(list(directory.iterdir()))

  def test_checkers_know_the_flags_of_the_command(self):
    known = {'num_workers', *functions.Flags.__annotations__}
    # Other hosts have neither the function nor a place for its result.
    known |= {'hostfile', 'ssh'}
    self.assertEqual(known, {name for name, *_ in command.FLAGS})

  @parameterized.parameters(0, 1)
  def test_worker_that_ends_without_a_result_is_named(self, rank):
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, f'from rank {rank} of 3.*os._exit'
    ):
      tfs.launch(_leave, args=(rank,), num_workers=3)

  def test_servers_return_nothing(self):
    # Worker 0 is the one that the launcher ends.
    found = tfs.launch(_serve, num_workers=1, num_ps=1, chief=True)
    self.assertEqual(found, ['chief'])

  def test_error_of_a_worker(self):
    with self.assertRaisesRegex(
      errors.WorkerUnavailableError, r'worker 1 failed first'
    ) as caught:
      tfs.launch(_fail, args=('the key',))
    self.assertIsInstance(caught.exception.__cause__, KeyError)
    self.assertIn('the key', str(caught.exception))

  def test_script(self):
    path = pathlib.Path(self.create_tempdir().full_path, 'script.py')
    path.write_text(_SCRIPT)
    done = processes.run_python(str(path), 'x', 'work', is_checked=True)
    *lines, last = done.stdout.splitlines()
    self.assertEqual(last, '[0, 10, 20]')
    self.assertCountEqual(
      lines, [f'[worker {i}] working on {i}' for i in range(3)]
    )

  def test_classes_of_a_script(self):
    path = pathlib.Path(self.create_tempdir().full_path, 'script.py')
    path.write_text(_CLASSES)
    done = processes.run_python(str(path), is_checked=True)
    found = re.findall('^found (.*)', done.stdout, re.MULTILINE)
    results, cause, message = found
    self.assertEqual(results, '[Result(number=3), Result(number=3)]')
    self.assertEqual(cause, "Mistake('why')")
    self.assertRegex(
      message,
      "^WorkerUnavailableError.*rank 0 ret.*'seven'.*Fix: return numbers",
    )

  def test_script_without_a_main_block(self):
    path = pathlib.Path(self.create_tempdir().full_path, 'script.py')
    path.write_text(_UNGUARDED)
    done = processes.run_python(str(path))
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

  def test_script_of_stdin_is_sent_whole(self):
    main = types.ModuleType('__main__')
    main.__file__ = '<stdin>'
    with mock.patch.dict(sys.modules, {'__main__': main}):
      self.assertEqual(functions._main_script(), {})

  def test_function_that_ends_its_process(self):
    self.assertEqual(tfs.launch(sys.exit, num_workers=2), [None, None])

  @parameterized.parameters(signal.SIGINT, signal.SIGKILL)
  def test_end_of_the_caller_ends_the_workers(self, number):
    directory = pathlib.Path(self.create_tempdir().full_path)
    path = directory / 'script.py'
    path.write_text(_SCRIPT)
    notes = self.create_tempdir().full_path
    words = [sys.executable, str(path), notes, 'wait']
    env = processes.python_environment()
    with processes.Command(words, env=env, deadline_seconds=60) as command:
      command.wait_until(lambda: len(os.listdir(notes)) == 2)
      pids = [int(name) for name in os.listdir(notes)]
      command.signal(number)
      command.wait()
      said = command.output()
      ends_at = functions.process.time.monotonic() + 30
      while any(map(programs.is_running, pids)):
        self.assertLess(functions.process.time.monotonic(), ends_at)
    if number == signal.SIGINT:
      self.assertEqual(said.count('Traceback'), 1)  # The caller's own.
      self.assertIn('[launch] SIGINT', said)


if __name__ == '__main__':
  absltest.main()
