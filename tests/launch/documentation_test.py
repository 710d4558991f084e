"""The examples in docstrings run."""

from absl.testing import absltest

from tests import docstrings
from tf_strategies import launch


class DocumentationTest(absltest.TestCase):
  def test_examples_run(self):
    docstrings.check_examples(self, launch.__name__)


if __name__ == '__main__':
  absltest.main()
