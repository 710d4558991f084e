"""Ratios are of medians, and predictions are the ring's formula."""

from absl.testing import absltest, parameterized

from benchmarks import process_results
from tf_strategies.collectives import cost_model

LINK = cost_model.Link(2e-5, 3e-9)
SECONDS = {
  'ours_tcp': [0.002, 0.004, 0.003],
  'mwms_ring': [0.012, 0.008, 0.010],
  'gloo': [0.006, 0.006, 0.006],
  'no_op': [0.001, 0.001, 0.001],
}


def make_size(seconds=None, num_bytes=12_000, world_size=3):
  return process_results.Size(
    world_size, num_bytes, 5, seconds or SECONDS, LINK
  )


class SizeTest(parameterized.TestCase):
  def test_ratios(self):
    ratios = make_size().ratios()
    self.assertEqual(set(ratios), {'ours_tcp/mwms_ring', 'ours_tcp/gloo'})
    self.assertAlmostEqual(ratios['ours_tcp/mwms_ring'], 0.3)
    self.assertAlmostEqual(ratios['ours_tcp/gloo'], 0.5)

  def test_ratios_without_references(self):
    self.assertEqual(
      make_size({'ours_tcp': [1.0], 'no_op': [1.0]}).ratios(), {}
    )

  @parameterized.parameters(2, 3, 4)
  def test_prediction(self, world_size):
    rounds = 2 * (world_size - 1)
    expected = rounds * (2e-5 + 12_000 / world_size * 3e-9)
    found = make_size(world_size=world_size).predicted_ms()
    self.assertAlmostEqual(found, 1e3 * expected)

  def test_record(self):
    record = make_size().record()
    self.assertEqual(record['calls_in_a_sample'], 5)
    self.assertEqual(
      record['peers']['ours_tcp']['seconds'], [0.002, 0.004, 0.003]
    )
    # 2 (3 - 1) / 3 of 12 kB in 3 ms.
    self.assertAlmostEqual(
      record['peers']['ours_tcp']['bus_bandwidth_gb_per_s'], 16e3 / 3e-3 / 1e9
    )
    self.assertAlmostEqual(
      record['predicted_ring_ms'], make_size().predicted_ms()
    )


class LinkTest(absltest.TestCase):
  def test_noise_gives_no_negative_bandwidth(self):
    link = process_results.link_of([4.0], [2.0], 100)
    self.assertEqual(link, cost_model.Link(2.0, 0.0))


class TablesTest(absltest.TestCase):
  def test_times(self):
    lines = process_results.times_table(
      [make_size(), make_size(num_bytes=24_000_000)]
    ).splitlines()
    heads = [cell.strip() for cell in lines[0].strip('|').split('|')]
    self.assertEqual(
      heads,
      ['size', 'ours_tcp', 'ring predicted', 'mwms_ring', 'gloo', 'no_op'],
    )
    rows = [
      [cell.strip() for cell in line.strip('|').split('|')]
      for line in lines[2:]
    ]
    self.assertEqual([row[0] for row in rows], ['12.00 KB', '24.00 MB'])
    self.assertEqual(rows[0][1], '3 (2.2-3.8)')
    # 4 (20 us + 4 kB at 3 ns a byte), and with 8 MB.
    self.assertEqual([row[2] for row in rows], ['0.128', '96.1'])

  def test_ratios(self):
    self.assertIn(
      '|               0.30 |', process_results.ratios_table([make_size()])
    )
    self.assertEqual(
      process_results.ratios_table([make_size({'ours_tcp': [1.0]})]), ''
    )


if __name__ == '__main__':
  absltest.main()
