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


if __name__ == '__main__':
  absltest.main()
