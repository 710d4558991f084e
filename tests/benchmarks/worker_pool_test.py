"""Worker pools name failed workers. Pools and namespaces leave no process."""

import json
import os
import signal
import sys

from absl.testing import absltest, parameterized

from benchmarks import network_namespaces, processes, worker_pool
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
    print(json.dumps(workers.ask('describe')), flush=True)
    workers.send('fail_on', rank=5)
    time.sleep(3600)
"""


def make_pool(**options):
  return worker_pool.WorkerPool('tried', ACTOR, [()] * 3, **options)


def wait_until_gone(pids):
  wait_until(lambda: not any(map(programs.is_running, pids)), SECONDS)


class WorkerPoolTest(parameterized.TestCase):
  @parameterized.parameters(
    ('fail_on', 'tried.*a message from rank 1'),
    ('die_on', 'worker 1 died.*last words'),
  )
  def test_failed_worker_is_named_while_others_wait(self, method, message):
    with make_pool() as workers:
      pids = [answer[1] for answer in workers.ask('describe')]
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
      error_log=os.path.join(self.create_tempdir(), 'errors'),
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


def namespaces():
  listed = processes.run(['ip', 'netns', 'list'], is_checked=True)
  return [line.split()[0] for line in listed.stdout.splitlines()]


class RateTest(parameterized.TestCase):
  @parameterized.parameters('1', '0mbit', '1.5gbit')
  def test_invalid_rate_is_refused(self, text):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f'link rate {text!r}.*200mbit'
    ):
      network_namespaces.NetworkNamespaces(2, text)


class NetworkNamespacesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    reason = network_namespaces.missing()
    if reason is not None:
      self.skipTest(reason)

  def test_namespaces_and_processes_are_removed(self):
    with network_namespaces.NetworkNamespaces(2) as hosts:
      names = [n for n in namespaces() if f'-{os.getpid()}-' in n]

      def inside(host):
        name = hosts.command(host, [])[-1]
        return hosts.run(0, ['ip', 'netns', 'pids', name]).stdout.split()

      self.assertLen(names, 3)
      sleeper = self.enter_context(
        processes.Command(hosts.command(1, ['sleep', '3600']))
      )
      # The process is on the host only after `ip` has started the program.
      wait_until(lambda: str(sleeper.pid) in inside(1))
      self.assertNotIn(str(sleeper.pid), inside(0))
    self.assertEqual(sleeper.wait(), -9)
    self.assertEmpty(set(names) & set(namespaces()))


if __name__ == '__main__':
  absltest.main()
