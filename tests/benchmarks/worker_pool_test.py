"""Worker pools return results by rank, name failed workers and leave no process."""

import json
import os
import signal
import sys

from absl.testing import absltest, parameterized

from benchmarks import processes, worker_pool
from tests.benchmarks import running
from tests.launch import programs
from tests.processes import wait_until
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


def wait_until_gone(pids):
  wait_until(lambda: not any(map(programs.is_running, pids)), SECONDS)


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
      self.assertTrue(all(map(programs.is_running, pids)))
    wait_until_gone(pids)

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
    wait_until_gone(pids)

  @parameterized.parameters(signal.SIGTERM, signal.SIGKILL)
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
    self.assertTrue(all(map(programs.is_running, pids)))
    program.signal(number)
    wait_until_gone([*pids, program.pid])


if __name__ == '__main__':
  absltest.main()
