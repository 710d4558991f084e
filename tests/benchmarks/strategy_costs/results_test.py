"""Records contain the reports of all tasks."""

from absl.testing import absltest

from benchmarks.strategy_costs import catalogue, results
from tf_strategies import errors

WORKERS = catalogue.costs('multi_worker_ring')
MB = 1_000_000


def report(rank):
  """Returns the report of a task that trained two epochs of ten steps."""
  return {
    'is_chief': rank == 0,
    'iterations': 20,
    'steps': 20,
    'examples_per_second': 5000.0,
    'bytes_per_step': (None, None),
    'variable_bytes': {'CPU:0': 3, 'CPU:1': 4 + rank},
    'test': {'accuracy': 0.9},
    'timed_epochs': [
      {'loopback_bytes': 30 * MB},
      {'loopback_bytes': 10 * MB},
    ],
  }


class MeasuredTest(absltest.TestCase):
  def test_bytes_and_variables_of_all_workers_count(self):
    found = results.measured(WORKERS, [report(0), report(1)])
    # Over loopback, 40 MB in 20 steps.
    self.assertIsNone(found['bytes_per_step_into_busiest'])
    self.assertEqual(found['bytes_per_step_total'], 2 * MB)
    self.assertEqual(found['variable_bytes_total'], 3 + 4 + 3 + 5)
    self.assertEqual(found['variable_bytes_most'], 5)

  def test_strategy_that_is_none(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, "one_device, mirrored.*strategies='ring'"
    ):
      catalogue.costs('ring')


if __name__ == '__main__':
  absltest.main()
