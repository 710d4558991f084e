"""Runs the examples in the docstrings and compares their output."""

import tensorflow as tf
from absl.testing import parameterized

from tests import docstrings, virtual_devices

virtual_devices.configure()

# Modules of which at least one docstring has an example.
_MODULES = (
  'checkpoint.position',
  'fault_tolerance.elastic_callbacks',
  'fault_tolerance.run',
)


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*[(name,) for name in _MODULES])
  def test_examples_run(self, name):
    docstrings.assert_examples(self, f'tf_strategies.{name}')


if __name__ == '__main__':
  tf.test.main()
