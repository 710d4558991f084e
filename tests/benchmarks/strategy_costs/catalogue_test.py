"""Names become jobs; what is no job is refused."""

from absl.testing import absltest

from benchmarks.strategy_costs import catalogue
from tests import docstrings
from tf_strategies import errors


class CatalogueTest(absltest.TestCase):
  def test_default_rows_are_jobs(self):
    names = [catalogue.costs(job.name).name for job in catalogue.COSTS]
    self.assertLen(set(names), 8)

  def test_launcher_flags(self):
    self.assertEqual(catalogue.costs('ring_mirrored').launcher_flags, ())
    self.assertEqual(
      catalogue.costs('multi_worker_ring').launcher_flags,
      ('--num_workers=2',),
    )

  def test_bad_strategy(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "strategies='ring'.*one_device, mirrored"
    ):
      catalogue.costs('ring')

  def test_examples(self):
    docstrings.assert_examples(self, catalogue.__name__, 3)


if __name__ == '__main__':
  absltest.main()
