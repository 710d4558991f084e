"""Names become jobs; what is no job is refused."""

from absl.testing import absltest, parameterized

from benchmarks.strategy_costs import catalogue, results, watch
from tests import docstrings
from tf_strategies import errors


class CatalogueTest(parameterized.TestCase):
  def test_default_rows_are_jobs(self):
    names = [catalogue.costs(job.name).name for job in catalogue.COSTS]
    self.assertLen(set(names), 8)
    tasks = [
      catalogue.configuration(name).num_tasks
      for name in catalogue.CONFIGURATIONS
    ]
    # Parameter servers and their chief are tasks too.
    self.assertEqual(tasks, [1, 2, 4, 4, 5, 7])

  def test_launcher_flags(self):
    self.assertEqual(catalogue.costs('ring_mirrored').launcher_flags, ())
    self.assertEqual(
      catalogue.configuration('ring_4').launcher_flags, ('--num_workers=4',)
    )

  @parameterized.parameters(
    'ring', 'ring_0', 'ring_2x', 'async_2w', 'sync_0w1ps', 'bounded_2w1ps'
  )
  def test_bad_configuration(self, name):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f"configurations='{name}'.*ring_4"
    ):
      catalogue.configuration(name)

  def test_bad_strategy(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "strategies='ring'.*one_device, mirrored"
    ):
      catalogue.costs('ring')

  @parameterized.parameters((catalogue, 5), (results, 2), (watch, 3))
  def test_examples(self, module, least):
    docstrings.assert_examples(self, module.__name__, least)


if __name__ == '__main__':
  absltest.main()
