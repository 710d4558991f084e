"""Worker pools return results by rank, name failed workers and leave no process."""

import json
import os
import signal
import sys
import time

import psutil
from absl.testing import absltest, parameterized

from benchmarks import processes, worker_pool
from tests import tiers
from tests.benchmarks import running
from tf_strategies import errors

ACTOR = 'tests.benchmarks.pool_actor:Actor'
SECONDS = 60.0

# A program with a pool whose workers never finish.
PROGRAM = f"""
import json, time
from benchmarks import processes, worker_pool
with processes.ended_by_signals():
  with worker_pool.WorkerPool('busy', {ACTOR!r}, [(), ()]) as workers:
    print(json.dumps(workers.ask('describe', text='')), flush=True)
    workers.send('fail_on', rank=5)
    time.sleep(3600)
"""


def make_pool(**options):
  return worker_pool.WorkerPool('tried', ACTOR, [()] * 3, **options)


def is_running(pid):
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def wait_until_gone(pids):
  """Returns the processes that still run after the deadline."""
  ends_at = time.monotonic() + SECONDS
  while any(map(is_running, pids)) and time.monotonic() < ends_at:
    time.sleep(0.05)
  return [pid for pid in pids if is_running(pid)]


class WorkerPoolTest(parameterized.TestCase):
  def test_answers_by_rank(self):
    with make_pool(env={'POOL_TEST': 'set'}) as workers:
      pids = [answer[1] for answer in workers.ask('describe', text='')]
      self.assertLen(set(pids), 3)
      for text in 'ab':
        self.assertEqual(
          workers.ask('describe', text=text),
          [[rank, pids[rank], text, 'set'] for rank in range(3)],
        )
      self.assertTrue(all(map(is_running, pids)))
    self.assertEmpty(wait_until_gone(pids))

  @parameterized.parameters(
    ('fail_on', 'tried.*a word from rank 1'),
    ('die_on', 'worker 1 died.*last words'),
  )
  def test_failure_is_named_while_others_wait(self, method, message):
    with make_pool() as workers:
      pids = [answer[1] for answer in workers.ask('describe', text='')]
      with self.assertRaisesRegex(
        errors.WorkerUnavailableError, f'(?s){message}'
      ) as caught:
        workers.ask(method, rank=1)
      self.assertEqual(caught.exception.rank, 1)
    self.assertEmpty(wait_until_gone(pids))

  @tiers.parameters(tiers.soak(signal.SIGTERM), signal.SIGKILL)
  def test_no_worker_outlives_the_program(self, number):
    program = processes.Command(
      [sys.executable, '-c', PROGRAM],
      error_log=os.path.join(self.create_tempdir().full_path, 'errors'),
      cwd=running.ROOT,
      env=processes.python_environment(),
      deadline_seconds=SECONDS,
    )
    self.addCleanup(program.close)
    program.wait_until(lambda: '\n' in program.output())
    pids = [answer[1] for answer in json.loads(program.output())]
    self.assertLen(set(pids), 2)
    self.assertTrue(all(map(is_running, pids)))
    program.signal(number)
    self.assertEmpty(wait_until_gone([*pids, program.pid]))


class SignalsTest(absltest.TestCase):
  def test_handler_is_put_back(self):
    before = signal.getsignal(signal.SIGTERM)
    with (
      self.assertRaises(SystemExit) as caught,
      processes.ended_by_signals(),
    ):
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(SECONDS)
    self.assertEqual(caught.exception.code, 128 + signal.SIGTERM)
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)


if __name__ == '__main__':
  absltest.main()
