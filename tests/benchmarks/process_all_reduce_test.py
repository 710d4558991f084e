"""The benchmark runs with every peer that is installed, and is complete."""

import json
import os
import sys

import pytest
from absl.testing import absltest, parameterized

from benchmarks import network_namespaces
from benchmarks.process_peers import catalogue
from tests.benchmarks import running

# Torch is optional, and need not be in this environment.
TORCH_PYTHON = os.environ.get('TFS_TORCH_PYTHON', sys.executable)
SIZES = (4096, 65536)


@pytest.mark.soak
class ProcessAllReduceTest(parameterized.TestCase):
  def run_to_report(self, *flags):
    """Returns the report of a run that must end well, and what it printed."""
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = running.run_benchmark(
      'process_all_reduce',
      f'--report_json={path}',
      f'--torch_python={TORCH_PYTHON}',
      *flags,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    running.assert_has_table(self, path)
    return running.read_json(path), done.stdout

  def assert_record(self, record, peers, num_samples):
    self.assertEqual(set(record['peers']), set(peers))
    for name, found in record['peers'].items():
      self.assertLen(found['seconds'], num_samples, name)
      self.assertGreater(min(found['seconds']), 0, name)
      self.assertLessEqual(found['p10_ms'], found['median_ms'])
      self.assertLessEqual(found['median_ms'], found['p90_ms'])
    medians = {n: f['median_ms'] for n, f in record['peers'].items()}
    expected = {
      f'{e.name}/{reference}': medians[e.name] / medians[reference]
      for e in catalogue.ENTRIES
      for reference in ('mwms_ring', 'gloo', 'mpich')
      if e.kind == catalogue.OURS and {e.name, reference} <= set(peers)
    }
    self.assertEqual(set(record['ratios']), set(expected))
    for name, ratio in expected.items():
      self.assertAlmostEqual(record['ratios'][name], ratio)

  def test_all_peers(self):
    found, printed = self.run_to_report(
      '--world_sizes=2',
      f'--sizes_bytes={",".join(map(str, SIZES))}',
      '--rounds=2',
      '--repeats=2',
    )
    skipped = {}
    for entry in catalogue.ENTRIES:
      reason = catalogue.why_not(entry, TORCH_PYTHON, over_links=False)
      if reason is not None:
        skipped[entry.name] = reason
        self.assertIn(f'Without {entry.name}. {reason}', printed)
    self.assertEqual(found['skipped'], skipped)
    peers = set(catalogue.NAMES) - set(skipped)
    self.assertContainsSubset(
      {'ours_tcp', 'ours_in_graph', 'mwms_ring', 'no_op'}, peers
    )
    sizes = [(r['world_size'], r['num_bytes']) for r in found['results']]
    self.assertEqual(sizes, [(2, size) for size in SIZES])
    for record in found['results']:
      self.assert_record(record, peers, num_samples=4)
      for name in [*peers, *record['ratios']]:
        self.assertIn(f'| {name} ', printed)
    self.assertIn('| 4.10 KB ', printed)
    self.assertNotIn(os.uname().nodename, json.dumps(found))

  def test_over_links(self):
    reason = network_namespaces.missing()
    if reason is not None:
      self.skipTest(reason)
    found, _ = self.run_to_report(
      '--world_sizes=2',
      '--sizes_bytes=1000000',
      '--rounds=1',
      '--repeats=2',
      '--peers=ours_tcp,ours_int8,ours_mpi',
      '--link_rate=200mbit',
    )
    self.assertIn('ours_mpi', found['skipped'])
    (record,) = found['results']
    self.assert_record(record, ('ours_tcp', 'ours_int8'), num_samples=2)
    # 40 ms at that rate; loopback, which must not be taken, needs one.
    self.assertGreater(record['peers']['ours_tcp']['median_ms'], 20)

  def test_bad_flags(self):
    for flag, words in (
      ('--world_sizes=2,1', 'integers of 2 or more'),
      ('--link_rate=fast', "link rate of 'fast'"),
    ):
      done = running.run_benchmark('process_all_reduce', flag)
      self.assertNotEqual(done.returncode, 0)
      self.assertIn(words, done.stdout + done.stderr)


if __name__ == '__main__':
  absltest.main()
