"""A host that is cut off is named by every other, within the deadline."""

import json
import os
import sys
import time

import pytest
from absl.testing import absltest

from benchmarks import network_namespaces
from benchmarks import processes as commands
from tests import processes
from tests.integration import worker_on_host

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

_PORT = 23450
_SECONDS = 60.0


def _lines(path):
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f.read().splitlines() if line]


class CutLinkTest(absltest.TestCase):
  @pytest.mark.soak
  def test_cut_off_worker_is_named(self):
    why = network_namespaces.missing()
    if why:
      self.skipTest(why)
    directory = self.create_tempdir().full_path
    paths = [os.path.join(directory, str(rank)) for rank in range(3)]
    with network_namespaces.NetworkNamespaces(3, '1gbit') as hosts:
      workers = [f'{address}:{_PORT}' for address in hosts.addresses]
      started = [
        self.enter_context(self._start(hosts, rank, workers, path))
        for rank, path in enumerate(paths)
      ]
      for command, path in zip(started, paths, strict=True):
        command.wait_until(lambda p=path: len(_lines(p)) > 5)
      hosts.cut_link(1)
      cut = time.time()
      for command in started:
        command.wait()
    ends = [_lines(path)[-1] for path in paths]
    for end in ends:
      self.assertTrue(end.get('is_typed'), end)
      self.assertEqual(end['error'], 'WorkerUnavailableError')
      # Silence counts from the last heartbeat, and is looked for now and then.
      deadline = worker_on_host.HEARTBEAT_TIMEOUT_SECONDS
      self.assertBetween(end['time'] - cut, 0.5, deadline + 5)
    for rank in (0, 2):
      self.assertIn(workers[1], ends[rank]['message'])
      self.assertEqual(ends[rank]['rank'], 1)
    print('named after', [round(end['time'] - cut, 1) for end in ends], 's')

  def _start(self, hosts, rank, workers, path):
    words = [sys.executable, '-m', 'tests.integration.worker_on_host', path]
    return commands.Command(
      hosts.command(rank, [*words, str(_SECONDS)]),
      name=f'worker {rank}',
      env=commands.python_environment(
        {
          'TF_CONFIG': processes.tf_config({'worker': workers}, rank),
          'TFS_SECRET': 'a secret of the hosts',
        }
      ),
      deadline_seconds=2 * _SECONDS,
    )


if __name__ == '__main__':
  absltest.main()
