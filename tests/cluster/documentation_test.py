"""The examples in docstrings run, and the room stays free of TensorFlow."""

import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

from absl.testing import absltest, parameterized

from tests.architecture import project
from tf_strategies import cluster

_MODULES = (
  cluster.__name__,
  *sorted(
    info.name
    for info in pkgutil.walk_packages(cluster.__path__, f'{cluster.__name__}.')
  ),
)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(*_MODULES)
  def test_examples_run(self, name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    self.assertEqual(result.failed, 0)
    self.assertGreater(result.attempted, 0)

  def test_every_module_is_found(self):
    self.assertIn('tf_strategies.cluster.config', _MODULES)
    self.assertIn('tf_strategies.cluster.checks', _MODULES)

  def test_public_names_exist_and_are_documented(self):
    self.assertEqual(cluster.__all__, sorted(cluster.__all__))
    for name in cluster.__all__:
      self.assertNotEmpty(inspect.getdoc(getattr(cluster, name)), name)

  def test_no_import_loads_tensorflow(self):
    code = f"""
import importlib, sys
for name in {_MODULES!r}:
  importlib.import_module(name)
print('tensorflow' in sys.modules, 'keras' in sys.modules)
"""
    done = subprocess.run(
      [sys.executable, '-c', code],
      stdout=subprocess.PIPE,
      timeout=120,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
      check=True,
    )
    self.assertEqual(done.stdout.split(), [b'False', b'False'])

  def test_only_servers_use_tensorflow(self):
    files = {
      path: source
      for path, source in project.python_files('tf_strategies').items()
      if path.startswith(('tf_strategies/cluster/', 'tf_strategies/launch'))
    }
    self.assertIn('tf_strategies/cluster/config.py', files)
    # There a server is started, and until then nothing is loaded.
    del files['tf_strategies/cluster/run_task.py']
    for path, source in files.items():
      for item in project.imports(path, source):
        top = item.base.partition('.')[0]
        self.assertNotIn(top, ('tensorflow', 'keras'), f'{path}:{item.line}')


if __name__ == '__main__':
  absltest.main()
