"""The examples in docstrings run, and the room stays free of TensorFlow."""

from absl.testing import absltest, parameterized

from tests import docstrings
from tests.architecture import project
from tf_strategies import cluster

_MODULES = docstrings.modules_of(cluster)


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(*_MODULES)
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name)

  def test_every_module_is_found(self):
    self.assertIn('tf_strategies.cluster.config', _MODULES)
    self.assertIn('tf_strategies.cluster.checks', _MODULES)

  def test_public_names_exist_and_are_documented(self):
    docstrings.assert_public_names(self, cluster)

  def test_no_import_loads_tensorflow(self):
    docstrings.assert_imports_load_none(self, _MODULES, ['tensorflow', 'keras'])

  def test_only_servers_use_tensorflow(self):
    files = {
      path: source
      for path, source in project.python_files('tf_strategies').items()
      if path.startswith(('tf_strategies/cluster/', 'tf_strategies/launch/'))
    }
    self.assertIn('tf_strategies/cluster/config.py', files)
    # There a server is started, and until then nothing is loaded.
    del files['tf_strategies/cluster/run_task.py']
    del files['tf_strategies/cluster/reachability.py']
    for path, source in files.items():
      for item in project.imports(path, source):
        top = item.base.partition('.')[0]
        self.assertNotIn(top, ('tensorflow', 'keras'), f'{path}:{item.line}')


if __name__ == '__main__':
  absltest.main()
