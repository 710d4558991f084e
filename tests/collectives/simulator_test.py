"""The reference itself: simultaneous rounds, and sums of compressed chunks."""

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests.collectives.simulator import simulate
from tf_strategies.collectives.algorithms import ALGORITHMS
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


class CompressedTest(parameterized.TestCase):
  @parameterized.product(
    name=tuple(ALGORITHMS),
    codec=('float16', 'bfloat16'),
    world_size=(2, 5, 8),
  )
  def test_ranks_agree_and_are_near_the_sum(self, name, codec, world_size):
    rng = np.random.default_rng(world_size)
    inputs = rng.normal(size=(world_size, 37)).astype(np.float32)
    schedule = ALGORITHMS[name](world_size)
    simulation = simulate(schedule, inputs, codec)
    for output in simulation.outputs:
      # To the bit: a rank that kept its own sum in full would drift away.
      np.testing.assert_array_equal(output, simulation.outputs[0], strict=True)
      self.assertEqual(output.dtype, np.float32)
    # Each value is rounded at most once for each round that it passes.
    unit = 2.0**-11 if codec == 'float16' else 2.0**-8
    size = np.sum(np.abs(inputs), axis=0)
    error = np.abs(simulation.outputs[0] - np.sum(inputs, axis=0))
    bound = 1.01 * unit * world_size * size
    np.testing.assert_array_less(error, bound + 1e-6)

  @pytest.mark.smoke
  def test_sums_are_made_in_float32(self):
    # 256 + 1 is no bfloat16: summing in it would lose all 16 additions.
    inputs = [np.float32([256])] + [np.float32([1])] * 16
    output = simulate(naive_all_reduce(17), inputs, 'bfloat16').outputs[3]
    self.assertEqual(output.item(), 272)


if __name__ == '__main__':
  absltest.main()
