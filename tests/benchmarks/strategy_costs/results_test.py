"""Records contain the reports of all tasks."""

from absl.testing import absltest

from benchmarks.strategy_costs import catalogue, results
from tf_strategies import errors

WORKERS = catalogue.costs('multi_worker_ring')
MB = 1_000_000


def report(rank=0, **changes):
  """Returns the report of a task that trained two epochs of ten steps."""
  return {
    'rank': rank,
    'is_chief': rank == 0,
    'iterations': 20,
    'steps': 20,
    'examples_per_second': 5000.0,
    'bytes_per_step': (None, None),
    'variable_bytes': {'CPU:0': MB},
    'test': {'loss': 0.2, 'accuracy': 0.9},
    'timed_epochs': [
      {'seconds': 1.5, 'rows': 640, 'loopback_bytes': 30 * MB},
      {'seconds': 1.0, 'rows': 640, 'loopback_bytes': 10 * MB},
    ],
    **changes,
  }


class MeasuredTest(absltest.TestCase):
  def test_bytes_and_variables_of_all_workers_count(self):
    reports = [
      report(rank, variable_bytes={'CPU:0': 3, 'CPU:1': 4 + rank})
      for rank in (0, 1)
    ]
    found = results.measured(WORKERS, reports)
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
