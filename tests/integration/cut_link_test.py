"""Elastic jobs continue without hosts that are cut off, which rejoin later."""

import json
import os
import signal
import sys
import time

import pytest
import tensorflow as tf
from absl.testing import parameterized

from benchmarks import network_namespaces
from benchmarks import processes as commands
from tests import processes, tiers
from tests.fault_tolerance import elastic_case, elastic_program

_PORT = 23450


def _lines(path):
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f.read().splitlines() if line]


def _begin(fault, hosts, job, victim):
  if fault == 'cut':
    hosts.cut_link(victim)
  else:
    number = signal.SIGKILL if fault == 'kill' else signal.SIGSTOP
    job[victim].process.send_signal(number)


def _end(fault, hosts, job, victim):
  if fault == 'cut':
    hosts.restore_link(victim)
  else:
    job[victim].process.send_signal(signal.SIGCONT)


class CutLinkTest(elastic_case.ElasticCase):
  def setUp(self):
    super().setUp()
    if reason := network_namespaces.missing():
      self.skipTest(reason)

  @tiers.named_parameters(
    # Either the host that was cut off waits, or both sides continue and
    # reunite.
    tiers.soak('majority', 'majority'),
    tiers.soak('both_sides', 1),
  )
  def test_job_continues_and_the_host_rejoins(self, min_workers):
    steps = [self.path(f'steps_{rank}') for rank in range(3)]
    epochs = 12
    how = {'step_seconds': 0.25, 'epochs': epochs}
    options = {'min_workers': min_workers, 'window_seconds': 1}
    with network_namespaces.NetworkNamespaces(3, '1gbit') as hosts:
      start = self._starter(hosts, options, how)
      job = [start(rank) for rank in range(3)]
      for command, path in zip(job, steps, strict=True):
        command.wait_until(lambda p=path: len(_lines(p)) > 5)
      hosts.cut_link(2)
      # Longer than the time after which a silent worker counts as dead.
      time.sleep(12)
      done = [len(_lines(path)) for path in steps]
      time.sleep(6)
      more = [len(_lines(p)) - n for p, n in zip(steps, done, strict=True)]
      hosts.restore_link(2)
      statuses = [command.wait() for command in job]
    self.assertEqual(statuses, [0] * 3)
    for rank in (0, 1):
      self.assertGreater(more[rank], 5)
    self.assertEqual(more[2] > 5, min_workers == 1, more)
    outcomes = self.outcomes()
    self.assert_results(outcomes, epochs, 1e-5)
    sizes = [
      [g.world_size for g in outcome.value['generations']]
      for outcome in outcomes
    ]
    print(sizes)
    # A worker that was left out may need two attempts to rejoin.
    for survivor in sizes[:2]:
      self.assertEqual((survivor[:2], survivor[-1]), ([3, 2], 3))
    self.assertEqual(set(sizes[2]), {3, 1} if min_workers == 1 else {3})

  @parameterized.parameters(*range(20))
  @pytest.mark.soak
  def test_random_faults(self, part):
    """Draws five of a hundred faults: kills, stops and cuts of one or two workers."""
    chance = self.chance(part)
    kind, epochs = chance.choice(['plain', 'rich', 'two_optimizers']), 30
    how = {'step_seconds': 0.1, 'epochs': epochs, 'kind': kind}
    options = {
      'min_workers': chance.choice(['majority', 1]),
      'window_seconds': 1,
    }
    faults = []
    with network_namespaces.NetworkNamespaces(3, '1gbit') as hosts:
      start = self._starter(hosts, options, how)
      job = [start(rank) for rank in range(3)]
      for _ in range(5):
        time.sleep(chance.uniform(0, 5))
        victims = chance.sample(range(3), chance.choice([1, 1, 1, 2]))
        fault, seconds = chance.choice(['kill', 'stop', 'cut']), 0.0
        if fault != 'kill':
          seconds = chance.uniform(0, 12)
        faults.append((fault, victims, round(seconds, 1)))
        for victim in victims:
          _begin(fault, hosts, job, victim)
        time.sleep(seconds)
        for victim in victims:
          if fault == 'kill':
            job[victim] = start(victim, attempt=1)
          else:
            _end(fault, hosts, job, victim)
      statuses = [command.wait() for command in job]
    print(options, kind, faults)
    self.assertEqual(statuses, [0] * 3)
    self.assert_results(self.outcomes(), epochs, 1e-5, kind)

  def outcomes(self):
    """Returns the results of the workers."""
    return [elastic_program.outcome(self.directory, rank) for rank in range(3)]

  def _starter(self, hosts, options, how):
    """Returns a function that starts a worker of an elastic job."""
    workers = [f'{address}:{_PORT}' for address in hosts.addresses]
    words = [sys.executable, '-m', 'tests.fault_tolerance.elastic_program']
    words += [self.directory, json.dumps(options), json.dumps(how)]

    def start(rank, attempt=0):
      env = {
        'TF_CONFIG': processes.tf_config({'worker': workers}, rank),
        'TFS_SECRET': 'a secret of the hosts',
        'TFS_RESTART_COUNT': str(attempt),
      }
      command = commands.Command(
        hosts.command(rank, words),
        name=f'worker {rank}',
        env=commands.python_environment(env),
        deadline_seconds=240.0,
      )
      return self.enter_context(command)

    return start


if __name__ == '__main__':
  tf.test.main()
