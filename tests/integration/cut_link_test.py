"""A host that is cut off is named by every other, within the deadline."""

import json
import os
import subprocess
import sys
import time

import pytest
from absl.testing import absltest

from benchmarks import network_namespaces
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
        self._start(hosts, rank, workers, path)
        for rank, path in enumerate(paths)
      ]
      try:
        self._wait_for(lambda: all(len(_lines(p)) > 5 for p in paths))
        hosts.cut_link(1)
        cut = time.time()
        for process in started:
          process.wait(timeout=_SECONDS)
      finally:
        for process in started:
          process.kill()
          process.wait(timeout=10)
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
    environment = {
      **os.environ,
      'TF_CONFIG': processes.tf_config({'worker': workers}, rank),
      'TFS_SECRET': 'a secret of the hosts',
      'TF_CPP_MIN_LOG_LEVEL': '2',
    }
    command = [sys.executable, '-m', 'tests.integration.worker_on_host', path]
    return subprocess.Popen(
      hosts.command(rank, [*command, str(_SECONDS)]),
      env=environment,
      stderr=subprocess.DEVNULL,
    )

  def _wait_for(self, condition):
    ends_at = time.monotonic() + _SECONDS
    while not condition():
      self.assertLess(time.monotonic(), ends_at, 'training did not begin')
      time.sleep(0.05)


if __name__ == '__main__':
  absltest.main()
