"""The reference itself: simultaneous rounds, and sums in float32."""

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests.collectives.simulator import simulate
from tf_strategies.collectives.algorithms.naive import naive_all_reduce
from tf_strategies.collectives.schedule import Schedule, Transfer


class SimulateTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_a_round_is_simultaneous(self):
    rotate = Schedule(
      'rotate',
      3,
      1,
      tuple(Transfer(0, r, (r + 1) % 3, 0, False) for r in (0, 1, 2)),
    )
    inputs = [np.array([rank]) for rank in range(3)]
    outputs = simulate(rotate, inputs).outputs
    self.assertEqual([output.tolist() for output in outputs], [[2], [0], [1]])


class SixteenBitsTest(parameterized.TestCase):
  @pytest.mark.smoke
  def test_sums_are_made_in_float32(self):
    # 256 + 1 is no bfloat16: summing in it would lose all 16 additions.
    inputs = [np.array([n], 'bfloat16') for n in (256, *[1] * 16)]
    output = simulate(naive_all_reduce(17), inputs).outputs[3]
    self.assertEqual(output.item(), 272)


if __name__ == '__main__':
  absltest.main()
