"""Ratios use medians, and tables contain all of them."""

from absl.testing import absltest

from benchmarks import process_results

SECONDS = {
  'ours_tcp': [0.002, 0.004, 0.003],
  'mwms_ring': [0.012, 0.008, 0.010],
  'gloo': [0.006, 0.006, 0.006],
  'no_op': [0.001, 0.001, 0.001],
}


def make_size(seconds=None, num_bytes=12_000):
  return process_results.Size(3, num_bytes, 5, seconds or SECONDS)


class SizeTest(absltest.TestCase):
  def test_ratios(self):
    ratios = make_size().ratios()
    self.assertEqual(set(ratios), {'ours_tcp/mwms_ring', 'ours_tcp/gloo'})
    self.assertAlmostEqual(ratios['ours_tcp/mwms_ring'], 0.3)
    self.assertAlmostEqual(ratios['ours_tcp/gloo'], 0.5)

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


if __name__ == '__main__':
  absltest.main()
