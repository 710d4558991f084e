"""The examples in docstrings run, and commands start without TensorFlow."""

import tensorflow as tf
from absl.testing import parameterized

from tests import docstrings, virtual_devices
from tests.architecture import project
from tf_strategies import cluster, kubernetes, launch

virtual_devices.configure()


def _modules_with_examples():
  """Returns the modules whose docstrings have examples."""
  return [
    project.module_name(path)
    for path, source in project.python_files(
      'tf_strategies', 'examples'
    ).items()
    if '>>> ' in source and not path.startswith('tf_strategies/collectives')
  ]


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*_modules_with_examples())
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name)

  def test_every_module_is_found(self):
    self.assertContainsSubset(
      (
        'examples.datasets.idx',
        'tf_strategies',
        'tf_strategies.launch.supervisor',
      ),
      _modules_with_examples(),
    )

  def test_commands_load_no_tensorflow(self):
    packages = (cluster, kubernetes, launch)
    modules = [
      name for each in packages for name in docstrings.modules_of(each)
    ]
    docstrings.assert_imports_load_none(
      self, modules, ['tensorflow', 'keras', 'yaml']
    )


if __name__ == '__main__':
  tf.test.main()
