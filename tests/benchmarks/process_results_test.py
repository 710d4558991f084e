"""Ratios use medians."""

from absl.testing import absltest

from benchmarks import process_results

_SECONDS = {
  'ours_tcp': [0.002, 0.004, 0.003],
  'mwms_ring': [0.012, 0.008, 0.010],
  'gloo': [0.006, 0.006, 0.006],
  'no_op': [0.001, 0.001, 0.001],
}


class SizeTest(absltest.TestCase):
  def test_ratios(self):
    ratios = process_results.Size(3, 12_000, 5, _SECONDS).ratios()
    self.assertEqual(set(ratios), {'ours_tcp/mwms_ring', 'ours_tcp/gloo'})
    self.assertAlmostEqual(ratios['ours_tcp/mwms_ring'], 0.3)
    self.assertAlmostEqual(ratios['ours_tcp/gloo'], 0.5)


if __name__ == '__main__':
  absltest.main()
