"""The examples in public docstrings run and give the results that they show."""

import tensorflow as tf
from absl.testing import parameterized

from tests import docstrings, virtual_devices

virtual_devices.configure()

# Modules with an example in at least one docstring.
_MODULES = (
  'tf_strategies',
  'tf_strategies.errors',
  'tf_strategies.cross_device',
  'tf_strategies.cross_device.base',
  'tf_strategies.cross_device.statistics',
  'tf_strategies.keras.lazy_rows',
  'tf_strategies.keras.dynamic_embedding',
  'tf_strategies.strategies.mirrored.devices',
  'tf_strategies.strategies.registry',
  'tf_strategies.strategies.central_storage.strategy',
  'tf_strategies.strategies.mirrored.strategy',
  'tf_strategies.strategies.tpu.strategy',
)


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*[(name,) for name in _MODULES])
  def test_examples_run(self, name):
    docstrings.assert_examples(self, name)


if __name__ == '__main__':
  tf.test.main()
