"""Times of peers that did different work are rejected."""

import math

from absl.testing import absltest, parameterized

from benchmarks.parameter_server_peers import results


class CheckTurnTest(parameterized.TestCase):
  def test_reference_may_miss_steps_but_not_add_any(self):
    results.check_turn('stock', {'iterations': 17, 'loss': 1.0}, 30, 2.3)
    for count in (0, 31):
      with self.assertRaisesRegex(RuntimeError, f'stock applied {count} steps'):
        results.check_turn('stock', {'iterations': count, 'loss': 1}, 30, 2.3)

  @parameterized.parameters(
    (29, 1.0, 'ours applied 29 steps, not 30'),
    (30, 2.3, 'ours has a loss of 2.3 after 30 steps, and 2.3 before'),
    (30, math.nan, 'ours has a loss of nan'),
  )
  def test_wrong(self, iterations, loss, words):
    turn = {'iterations': iterations, 'loss': loss}
    with self.assertRaisesRegex(RuntimeError, words):
      results.check_turn('ours', turn, 30, 2.3)

  def test_beginnings(self):
    results.check_beginnings({'stock': 2.3, 'ours': 2.30001})
    for other in (2.31, math.nan):
      with self.assertRaisesRegex(RuntimeError, 'ours begins with a loss of'):
        results.check_beginnings({'stock': 2.3, 'ours': other})


if __name__ == '__main__':
  absltest.main()
