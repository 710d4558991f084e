"""The examples in docstrings run."""

import tensorflow as tf
from absl.testing import parameterized

from tests import docstrings


class DocumentationTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters('epoch', 'timeline', 'timeline_svg', 'variants')
  def test_examples_run(self, name):
    docstrings.assert_examples(self, f'benchmarks.input_pipeline.{name}')


if __name__ == '__main__':
  tf.test.main()
