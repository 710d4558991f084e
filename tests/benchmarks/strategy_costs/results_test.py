"""Records and tables say what the tasks reported, and what failed."""

from absl.testing import absltest

from benchmarks.strategy_costs import catalogue, results
from tests.benchmarks.strategy_costs import made_up

ONE = catalogue.costs('one_device')
RING = catalogue.costs('ring_mirrored')
WORKERS = catalogue.costs('multi_worker_ring')
MB = made_up.MEGABYTE


def cells(table):
  """Of each row below the head."""
  return [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in table.splitlines()[2:]
  ]


class MeasuredTest(absltest.TestCase):
  def test_bytes_between_devices_are_what_was_counted(self):
    counted = {'into_busiest_device': 5.0, 'into_all_devices': 15.0}
    found = results.measured(
      RING, made_up.finished(made_up.report(bytes_per_step=counted))
    )
    self.assertEqual(found['bytes_per_step_into_busiest'], 5.0)
    self.assertEqual(found['bytes_per_step_total'], 15.0)

  def test_bytes_between_processes_are_those_over_loopback(self):
    reports = [
      made_up.report(rank, bytes_per_step={'sent_by_this_worker': 7.0})
      for rank in (0, 1)
    ]
    found = results.measured(WORKERS, made_up.finished(*reports))
    self.assertIsNone(found['bytes_per_step_into_busiest'])
    # 40 MB in 20 steps.
    self.assertEqual(found['bytes_per_step_total'], 2 * MB)
    self.assertEqual(
      found['bytes_per_step_counted'], {'sent_by_this_worker': 7.0}
    )

  def test_no_counter_of_loopback_is_no_number(self):
    epochs = [{'seconds': 1.0, 'rows': 1, 'loopback_bytes': None}]
    found = results.measured(
      WORKERS, made_up.finished(made_up.report(timed_epochs=epochs))
    )
    self.assertIsNone(found['bytes_per_step_total'])

  def test_variables_of_all_workers_count(self):
    reports = [
      made_up.report(rank, variable_bytes={'CPU:0': 3, 'CPU:1': 4 + rank})
      for rank in (0, 1)
    ]
    found = results.measured(WORKERS, made_up.finished(*reports))
    self.assertEqual(found['variable_bytes_total'], 3 + 4 + 3 + 5)
    self.assertEqual(found['variable_bytes_most'], 5)
    self.assertLen(found['variable_bytes'], 4)

  def test_other_steps_are_refused(self):
    job = made_up.finished(made_up.report(iterations=19))
    with self.assertRaisesRegex(RuntimeError, 'applied 19 steps, not 20'):
      results.measured(ONE, job)


class TableTest(absltest.TestCase):
  def _run(self, **changes):
    return results.measured(ONE, made_up.finished(made_up.report(**changes)))

  def test_costs(self):
    counted = {'into_busiest_device': 1.5 * MB, 'into_all_devices': 6.0 * MB}
    runs = [
      results.measured(
        RING,
        made_up.finished(
          made_up.report(bytes_per_step=counted, examples_per_second=rate)
        ),
      )
      for rate in (9000.0, 7000.0, 7500.0)
    ]
    rows = [
      results.Rows(RING, runs),
      results.Rows(ONE, [], 'one_device did not end within 1 s'),
    ]
    ring, failed = cells(results.cost_table(rows, num_devices=4))
    self.assertEqual(
      ring,
      ['ring_mirrored', '4 devices', '7,500 (7,000-9,000)', '1.50', '6.00']
      + ['1.00', '1.00', '700', '0.9000'],
    )
    self.assertEqual(failed, ['one_device', '1 device', 'failed'] + [''] * 6)

  def test_scaling(self):
    job = catalogue.configuration('async_2w1ps')
    row = results.Rows(job, [self._run()])
    ((*start, seconds, loss, accuracy),) = cells(
      results.scaling_table([row], target=0.15, epochs=2)
    )
    self.assertEqual(start, ['async_2w1ps', '2 workers, 1 server', '5,000'])
    # The first evaluation at or below the target, though the next is above.
    self.assertEqual(seconds, '1.5')
    self.assertEqual((loss, accuracy), ('0.200', '0.9000'))

  def test_loss_that_was_not_reached(self):
    row = results.Rows(ONE, [self._run()])
    for epochs, words in (
      (2, 'not in 2 epochs: 0.13'),
      (1, 'not in 1 epoch: 0.13'),
    ):
      ((*_, cell, _, _),) = cells(results.scaling_table([row], 0.1, epochs))
      self.assertEqual(cell, words)

  def test_loss_that_one_round_did_not_reach(self):
    worse = self._run(curve=[[0.0, 2.3], [1.0, 0.4]])
    row = results.Rows(ONE, [self._run(), worse])
    self.assertIsNone(row.seconds_to_loss(0.15))
    self.assertEqual(row.lowest_loss(), 0.4)
    self.assertEqual(row.seconds_to_loss(0.5), 1.25)

  def test_record_keeps_every_run(self):
    rows = results.Rows(WORKERS, [self._run(), self._run()], 'why')
    found = rows.record(0.15)
    self.assertEqual(found['name'], 'multi_worker_ring')
    self.assertEqual(found['num_workers'], 2)
    self.assertEqual(found['error'], 'why')
    self.assertLen(found['runs'], 2)
    # What tables need, as they have it.
    self.assertEqual(found['images_per_s'], 5000.0)
    self.assertEqual(found['test_accuracy'], 0.9)
    self.assertEqual(found['seconds_to_loss'], 1.5)


if __name__ == '__main__':
  absltest.main()
