"""Names become jobs, and unknown names are rejected."""

from absl.testing import absltest

from benchmarks.strategy_costs import catalogue
from tests import docstrings
from tf_strategies import errors


class CatalogueTest(absltest.TestCase):
  def test_bad_strategy(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "one_device, mirrored.*strategies='ring'"
    ):
      catalogue.costs('ring')

  def test_examples(self):
    docstrings.assert_examples(self, catalogue.__name__, 3)


if __name__ == '__main__':
  absltest.main()
