"""`run_task` in real processes with real servers and signals."""

import os
import socket
import sys
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import processes
from tests.processes import addresses
from tf_strategies import cluster, errors
from tf_strategies.cluster import reachability

_FAIL_FAST = 'GRPC_FAIL_FAST'


def _jobs(num_workers=1, num_ps=1):
  """Returns the addresses of a job with a chief."""
  counts = {'chief': 1, 'worker': num_workers, 'ps': num_ps}
  return {job: addresses(count) for job, count in counts.items() if count}


def _listen(address):
  host, _, port = address.partition(':')
  return socket.create_server((host, int(port)))


_PROGRAM = """
from tf_strategies import cluster
cluster.run_task(lambda: print('trained'), lambda: print('evaluated'))
"""


class ServersTest(parameterized.TestCase):
  def start_server(self, jobs):
    """Starts a server, which ends with the test."""
    config = cluster.ClusterConfig(jobs, 'ps', 0)
    task = processes.Command(
      [sys.executable, '-u', '-c', _PROGRAM],
      env=processes.python_environment(
        {'TF_CONFIG': config.to_tf_config()}, [_FAIL_FAST]
      ),
    )
    return self.enter_context(task)

  @pytest.mark.soak
  def test_terminated_server_runs_until_the_chief_ends(self):
    jobs = _jobs()
    chief = self.enter_context(_listen(jobs['chief'][0]))
    server = self.start_server(jobs)
    task = {'task': jobs['ps'][0]}
    server.wait_until(lambda: not reachability.unreachable(task))
    server.process.terminate()
    time.sleep(1.5)
    self.assertIsNone(server.process.poll(), server.output())
    chief.close()
    began = time.monotonic()
    self.assertEqual(server.wait(), 143, server.output())
    # Well before the limit of `_STAY_SECONDS`.
    self.assertLess(time.monotonic() - began, 10)

  @pytest.mark.soak
  def test_port_in_use_raises_an_error_with_its_address(self):
    jobs = _jobs()
    self.enter_context(_listen(jobs['ps'][0]))
    server = self.start_server(jobs)
    self.assertEqual(server.wait(), 1)
    last = server.output().strip().splitlines()[-1]
    self.assertStartsWith(last, 'tf_strategies.errors.RendezvousError: ')
    self.assertIn('ps 0, ', last)
    self.assertIn(jobs['ps'][0], last)
    self.assertIn('another port', last)


_EVALUATOR = """
import os, signal, sys, time
from tf_strategies import cluster
# The module. `cluster.run_task` is the function of the same name.
run_task = sys.modules['tf_strategies.cluster.run_task']
run_task._STAY_SECONDS = {stay_seconds}
def terminate():
  os.kill(os.getpid(), signal.SIGTERM)
def evaluate():
  {body}
  print('evaluated', flush=True)
signal.signal(signal.SIGTERM, signal.{before})
config = cluster.ClusterConfig({{'chief': ['a:1']}}, 'evaluator', 0)
cluster.run_task(print, evaluate, config)
print(signal.getsignal(signal.SIGTERM).name, flush=True)
"""


class EvaluatorTest(parameterized.TestCase):
  def run_evaluator(self, body, stay_seconds=60, before='SIG_DFL'):
    """Returns the exit status and the output of an evaluator that runs `body`."""
    code = _EVALUATOR.format(
      body=body, stay_seconds=stay_seconds, before=before
    )
    done = processes.run_python('-c', code)
    return done.returncode, done.stdout.split()

  @pytest.mark.smoke
  def test_last_checkpoint_is_evaluated_after_the_job(self):
    self.assertEqual(
      self.run_evaluator('terminate(); time.sleep(0.1)'),
      (0, ['evaluated', 'SIG_DFL']),
    )

  @parameterized.parameters(
    ('terminate(); time.sleep(0.1); terminate(); time.sleep(600)', 60),
    ('terminate(); time.sleep(600)', 0.1),
  )
  def test_second_signal_or_time_limit_ends_the_evaluator(
    self, body, stay_seconds
  ):
    body = f'print(time.time(), flush=True); {body}'
    status, (began,) = self.run_evaluator(body, stay_seconds)
    self.assertEqual(status, 143)
    # Before the default limit of 20 s.
    self.assertLess(time.time() - float(began), 15)

  def test_signal_handler_of_the_program_is_kept(self):
    self.assertEqual(
      self.run_evaluator('terminate(), terminate()', before='SIG_IGN'),
      (0, ['evaluated', 'SIG_IGN']),
    )


def _not_called():
  raise AssertionError('this task has another role')


class RolesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(os.environ))
    for name in (_FAIL_FAST, 'TF_CONFIG'):
      os.environ.pop(name, None)

  def run_task(self, jobs, task_type, index=0, **arguments):
    config = cluster.ClusterConfig(jobs, task_type, index)
    return cluster.run_task(cluster=config, **arguments)

  @pytest.mark.smoke
  def test_one_process_trains(self):
    self.assertEqual(
      cluster.run_task(lambda: 'trained', _not_called), 'trained'
    )
    self.assertNotIn(_FAIL_FAST, os.environ)

  def test_job_without_ps_trains_everywhere(self):
    # No task waits for servers: the strategies form their own group.
    jobs = _jobs(num_workers=2, num_ps=0)
    result = self.run_task(
      jobs, 'worker', 1, train=lambda: 'trained', evaluate=_not_called
    )
    self.assertEqual(result, 'trained')

  @pytest.mark.smoke
  def test_tf_config_is_read(self):
    config = cluster.ClusterConfig(_jobs(), 'evaluator', 0)
    os.environ['TF_CONFIG'] = config.to_tf_config()
    self.assertEqual(
      cluster.run_task(_not_called, lambda: 'evaluated'), 'evaluated'
    )

  def test_evaluator_without_a_function_logs_a_warning(self):
    with self.assertLogs('absl', 'WARNING') as logs:
      result = self.run_task(_jobs(), 'evaluator', train=_not_called)
    self.assertIsNone(result)
    self.assertIn('nothing to do', logs.output[0])

  def test_parameter_servers_without_a_chief_are_refused(self):
    jobs = _jobs()
    del jobs['chief']
    with self.assertRaisesRegex(
      errors.ClusterConfigError, r'add "chief": \["host:2222"\]'
    ):
      self.run_task(jobs, 'worker', train=_not_called, evaluate=_not_called)

  @parameterized.parameters(None, 'false')
  def test_grpc_calls_fail_fast_unless_the_user_disables_it(self, value):
    if value is not None:
      os.environ[_FAIL_FAST] = value
    jobs = _jobs()
    for job in ('ps', 'worker'):
      self.enter_context(_listen(jobs[job][0]))
    found = self.run_task(
      jobs, 'chief', train=lambda: os.environ[_FAIL_FAST], deadline_seconds=30
    )
    self.assertEqual(found, value or 'use_caller')

  def test_chief_does_not_train_without_servers(self):
    refused = errors.UnsupportedOptionError
    with self.assertRaisesRegex(refused, 'deadline_seconds=0'):
      cluster.run_task(_not_called, deadline_seconds=0)
    with self.assertRaisesRegex(errors.RendezvousError, 'ps 0'):
      self.run_task(_jobs(), 'chief', train=_not_called, deadline_seconds=0.1)


if __name__ == '__main__':
  absltest.main()
