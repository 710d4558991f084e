"""Records and tables contain the tasks' reports and failures."""

from absl.testing import absltest

from benchmarks.strategy_costs import catalogue, results
from tests.benchmarks.strategy_costs import made_up

ONE = catalogue.costs('one_device')
RING = catalogue.costs('ring_mirrored')
WORKERS = catalogue.costs('multi_worker_ring')
MB = made_up.MEGABYTE


def cells(table):
  """Returns the cells of each row below the head."""
  return [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in table.splitlines()[2:]
  ]


class MeasuredTest(absltest.TestCase):
  def test_bytes_between_processes_are_those_over_loopback(self):
    reports = [made_up.report(rank) for rank in (0, 1)]
    found = results.measured(WORKERS, reports)
    self.assertIsNone(found['bytes_per_step_into_busiest'])
    # 40 MB in 20 steps.
    self.assertEqual(found['bytes_per_step_total'], 2 * MB)

  def test_variables_of_all_workers_count(self):
    reports = [
      made_up.report(rank, variable_bytes={'CPU:0': 3, 'CPU:1': 4 + rank})
      for rank in (0, 1)
    ]
    found = results.measured(WORKERS, reports)
    self.assertEqual(found['variable_bytes_total'], 3 + 4 + 3 + 5)
    self.assertEqual(found['variable_bytes_most'], 5)


class RecordTest(absltest.TestCase):
  def _runs(self, *rates):
    counted = 1.5 * MB, 6.0 * MB
    return [
      results.measured(
        RING, [made_up.report(bytes_per_step=counted, examples_per_second=rate)]
      )
      for rate in rates
    ]

  def test_table(self):
    records = [
      results.record(RING, self._runs(9000.0, 7000.0, 7500.0)),
      results.record(ONE, [], 'one_device did not end within 1 s'),
    ]
    ring, failed = cells(results.table(records, num_devices=4))
    self.assertEqual(
      ring,
      ['`ring_mirrored`', '4 devices', '7,500 (7,000 to 9,000)', '1.50', '6.00']
      + ['1.00', '1.00', '0.9000'],
    )
    self.assertEqual(failed, ['`one_device`', '1 device', 'failed'] + [''] * 5)


if __name__ == '__main__':
  absltest.main()
