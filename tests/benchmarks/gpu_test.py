"""The GPU drill runs on CPUs, but its figures need a GPU."""

import os

import pytest
import tensorflow as tf

from benchmarks import gpu_parts, processes
from tests.benchmarks import running

_MADE_UP = """
from absl import app

from benchmarks import gpu

jobs = {
  'step': '''if True:
    import time
    print('{"environment": {"versions": {"keras": "3"}}}')
    print('{"strategy": "none", "median_ms": 2.5}', flush=True)
    time.sleep(600)
  ''',
  'workers': '''if True:
    print('{"by": "torch", "peer": "none", "xla": false, "median_ms": 2.0}')
    print('{"by": "torch", "peer": "DDP", "error": "a bucket is lost"}')
  ''',
  'links': 'raise ValueError("no links")',
  'startup': '''print('{"until": "the end", "seconds": 1.5}')''',
}
gpu.SHARES = {'step': (1,), 'workers': (3,), 'links': (3,), 'startup': (3, 1)}
gpu.programs = lambda part, *_: [(['-c', jobs[part]], {})]
app.run(gpu.main)
"""


class GpuBenchmarkTest(tf.test.TestCase):
  def test_keeps_rows_of_parts_that_fail_or_are_cut_off(self):
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    done = processes.run_python(
      *('-c', _MADE_UP, '--parts=startup,links,step,workers'),
      *('--limit_seconds=55', f'--report_json={path}'),
      cwd=running.ROOT,
    )
    self.assertEqual(done.returncode, 1, done.stderr)
    found = running.read_json(path)
    self.assertEqual(
      found['results'],
      {
        'step': [{'strategy': 'none', 'median_ms': 2.5}],
        'workers': [
          {'by': 'torch', 'peer': 'none', 'xla': False, 'median_ms': 2.0},
          {'by': 'torch', 'peer': 'DDP', 'error': 'a bucket is lost'},
        ],
        'links': [],
        'startup': 2 * [{'until': 'the end', 'seconds': 1.5}],
      },
    )
    self.assertEqual(found['versions'], {'keras': '3'})
    cut_off, failed_row, failed = found['failures']
    self.assertRegex(cut_off, r'^step 1, 5 s: cut off')
    self.assertRegex(failed_row, '^workers: .*DDP.*a bucket is lost')
    self.assertRegex(failed, r'(?s)^links 1, .*ValueError: no links')
    for failure in found['failures']:
      self.assertIn(failure, done.stderr)
    self.assertRegex(done.stdout, r'\| none +\| +2.50 \|')

  @pytest.mark.soak
  def test_drill_on_cpus(self):
    path = os.path.join(self.create_tempdir().full_path, 'report.json')
    # A loaded machine cuts off jobs that are slow, not wrong.
    limit = 720.0 * float(os.environ.get('TFS_DEADLINE_FACTOR', '1'))
    done = processes.run_python(
      *('-m', 'benchmarks.gpu', '--device=cpu', f'--report_json={path}'),
      f'--limit_seconds={limit}',
      cwd=running.ROOT,
      deadline_seconds=780.0,
    )
    self.assertEqual(done.returncode, 0, done.stderr[-4000:])
    found = running.read_json(path)
    self.assertEqual((found['failures'], found['hardware']['gpus']), ([], []))
    rows = found['results']
    # Each strategy with and without XLA.
    self.assertLen(rows['step'], 2 * sum(map(len, gpu_parts.STEPS)))
    for row in rows['step']:
      # TensorFlow's MirroredStrategy does not compile on two devices.
      if 'skipped' not in row or row['strategy'] != 'mirrored':
        self.assertGreater(row['ratio_to_none'], 0.0)
    self.assertEqual(
      [row['peer'] for row in rows['workers'][-4:]],
      2 * ['none'] + 2 * ['ring'],
    )
    self.assertEqual(
      {row['set'] for row in rows['all_reduce']}, {'4x64KB', '1x64KB'}
    )
    self.assertEqual({row['num_devices'] for row in rows['all_reduce']}, {2, 4})
    for row in rows['links']:
      self.assertIn(row['line'], done.stdout)
    for row in rows['mnist']:
      self.assertGreater(row['accuracy'], 0.9)
    self.assertEqual(
      [r['mode'] for r in rows['servers']], ['none', 'sync', 'async']
    )
    self.assertEqual([row['rows'] for row in rows['servers']], [8, 16, 8])
    seconds = [row['seconds'] for row in rows['startup']]
    self.assertAllGreater(seconds, 0.0)
    self.assertEqual(seconds, sorted(seconds))


if __name__ == '__main__':
  tf.test.main()
