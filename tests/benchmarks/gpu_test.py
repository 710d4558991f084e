"""The GPU benchmark keeps the results of all parts, even if some fail."""

import os

import tensorflow as tf

from benchmarks import processes
from tests.benchmarks import running

_PROGRAM = """
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
  def test_rows_of_failed_and_interrupted_parts_are_kept(self):
    path = os.path.join(self.create_tempdir(), 'report.json')
    done = processes.run_python(
      *('-c', _PROGRAM, '--parts=startup,links,step,workers'),
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


if __name__ == '__main__':
  tf.test.main()
