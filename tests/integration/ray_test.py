"""docs/ray.md on a local Ray cluster: two workers give the results of one."""

import importlib.util
import os
import pathlib
import re

from absl.testing import absltest

from benchmarks import processes
from tests import weights
from tests.architecture import project

# Runs the page's function variable Ray has set no TF_CONFIG.
_ALONE = """
import sys, types
for name in ('ray', 'ray.train', 'ray.train.tensorflow'):
  sys.modules[name] = types.ModuleType(name)
sys.modules['ray.train'].ScalingConfig = None
sys.modules['ray.train.tensorflow'].TensorflowTrainer = None
import runpy
runpy.run_path(sys.argv[1])['train']({'directory': sys.argv[2]})
"""


class RayTest(absltest.TestCase):
  def test_two_workers_give_the_weights_of_one(self):
    if importlib.util.find_spec('ray') is None:
      self.skipTest("no Ray: pip install 'ray[train]'")
    if (os.cpu_count() or 1) < 2:
      self.skipTest('Ray needs a CPU for each of two workers')
    page = project.text_files()['docs/ray.md']
    [program] = re.findall(r'^```python\n(.*?)^```', page, re.M | re.S)
    home = pathlib.Path(self.create_tempdir())
    alone, both = (pathlib.Path(self.create_tempdir()) for _ in range(2))
    path = home / 'page.py'
    path.write_text(program, encoding='utf-8')
    # Ray writes its results to the home directory.
    env = {'HOME': str(home), 'RAY_DEDUP_LOGS': '0'}
    done = processes.run_python(
      str(path), env=env, cwd=both, deadline_seconds=300
    )
    output = done.stdout + done.stderr
    self.assertEqual(done.returncode, 0, output[-5000:])
    for rank in range(2):
      self.assertIn(f'worker {rank} of 2', output)
    done = processes.run_python('-c', _ALONE, str(path), str(alone))
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('worker 0 of 1', done.stdout)
    found = [_weights(d / 'model.weights.h5') for d in (alone, both)]
    largest, variable = weights.largest_difference(*found)
    self.assertLessEqual(largest, 1e-6, variable)
    self.assertNotEmpty(found[0])


def _weights(path):
  import h5py

  found = {}
  with h5py.File(path) as file:
    file.visititems(
      lambda name, item: found.update(
        {name: item[()]} if isinstance(item, h5py.Dataset) else {}
      )
    )
  return found


if __name__ == '__main__':
  absltest.main()
