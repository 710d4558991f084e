"""Each benchmark runs from the command line and writes a complete report."""

import json
import os
import sys

import pytest
from absl.testing import absltest, parameterized

from benchmarks import network_namespaces, peers, training_peers
from benchmarks.parameter_server_peers import catalogue as servers
from benchmarks.process_peers import catalogue as process_peers
from benchmarks.strategy_costs import catalogue as strategies
from tests import tiers
from tests.benchmarks import running

# Torch is optional and may be missing in this environment.
_TORCH_PYTHON = os.environ.get('TFS_TORCH_PYTHON', sys.executable)
# Flags for a small run, and the names of the peers that the program prints.
_RUNS = {
  'all_reduce': (
    '--num_devices=2,4 --sets=4x4KB --rounds=2 --repeats=2',
    [peer.name for peer in peers.for_devices(4)],
  ),
  'process_all_reduce': (
    '--world_sizes=2 --sizes_bytes=4096,65536 --rounds=2 --repeats=2 '
    f'--torch_python={_TORCH_PYTHON}',
    process_peers.NAMES,
  ),
  'training_step': (
    '--width=16 --layers=3 --per_replica_batch_size=4 --rounds=2 --blocks=2 '
    '--steps=2',
    training_peers.NAMES,
  ),
  'parameter_server': (
    '--models=cnn --num_workers=2 --steps_per_execution=1,4 --steps=8 '
    '--rounds=2 --blocks=2 --per_replica_batch_size=4',
    [peer.name for peer in servers.PEERS],
  ),
  'recovery': ('--kills=2 --width=8', ['ours']),
  'strategies': (
    '--model=mlp --epochs=2 --steps_per_epoch=3',
    [f'`{job.name}`' for job in strategies.COSTS],
  ),
  'start_up': (
    '--models=transformer --layers=1',
    ['none', 'ring_mirrored', 'mirrored'],
  ),
  'input_pipeline': (
    '--dataset=synthetic --variants=naive,make_dataset --rounds=2 --num_files=4',
    ['naive', 'make_dataset'],
  ),
}


def _figures(value):
  """Returns all floats in a part of a report."""
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list):
    return [figure for each in value for figure in _figures(each)]
  return [value] if isinstance(value, float) else []


class ProgramsTest(parameterized.TestCase):
  def assert_complete(self, module, flags, words):
    directory = self.create_tempdir().full_path
    path = os.path.join(directory, 'report.json')
    if module == 'input_pipeline':
      flags = [*flags, f'--timeline={directory}/steps.svg']
    done = running.run_benchmark(module, *flags, f'--report_json={path}')
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, path)
    found = running.read_json(path)
    self.assertEqual(found['benchmark'], module)
    self.assertNotIn(os.uname().nodename, json.dumps(found))
    figures = _figures(found.get('results') or found.get('rows') or found)
    self.assertGreater(len(figures), 5)
    self.assertGreaterEqual(min(figures), 0.0)
    for word in words:
      # If a peer cannot run here, the program prints the reason.
      self.assertRegex(done.stdout, rf'(\| |Without ){word}[ .]')
    if module == 'input_pipeline':
      self.assertIn('trainer idle', done.stdout)
      self.assertIn('steps.svg', os.listdir(directory))

  @parameterized.parameters(*_RUNS)
  @pytest.mark.soak
  def test_report_is_complete(self, module):
    flags, words = _RUNS[module]
    self.assert_complete(module, flags.split(), words)

  @pytest.mark.soak
  def test_report_over_slow_links_is_complete(self):
    reason = network_namespaces.missing()
    if reason is not None:
      self.skipTest(reason)
    flags = '--world_sizes=2 --sizes_bytes=1000000 --rounds=1 --repeats=2'
    flags += ' --peers=ours_tcp,ours_mpi --link_rate=200mbit'
    words = ['ours_tcp', 'ours_mpi']
    self.assert_complete('process_all_reduce', flags.split(), words)

  # Some rows are soak tests because each must import TensorFlow.
  @tiers.parameters(
    ('input_pipeline', '--variants=naiv', "'naiv'"),
    tiers.soak('parameter_server', '--steps=25', 'no multiple of 10'),
    tiers.soak('strategies', '--deadline_seconds=1', 'did not end within'),
  )
  def test_failure_is_reported(self, module, flags, words):
    done = running.run_benchmark(module, *flags.split())
    self.assertNotEqual(done.returncode, 0)
    self.assertIn(words, done.stdout + done.stderr)


if __name__ == '__main__':
  absltest.main()
