"""The reference itself: shapes, dtypes, byte counts, compression."""

import hypothesis
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from tests.collectives.simulator import simulate
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.collectives.algorithms.naive import naive_all_reduce
from tf_strategies.collectives.algorithms.ring import ring_all_reduce
from tf_strategies.collectives.schedule import Schedule, Transfer

NAMES = tuple(ALGORITHMS)


class SimulateTest(parameterized.TestCase):
  @parameterized.parameters(*NAMES)
  @hypothesis.settings(deadline=None)
  @hypothesis.given(
    world_size=st.integers(1, 9),
    shape=st_np.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    dtype=st.sampled_from(
      ['int8', 'int64', 'uint16', 'float16', 'float32', 'float64', 'complex64']
    ),
    data=st.data(),
  )
  def test_any_shape_and_dtype(self, name, world_size, shape, dtype, data):
    # Small integers are exact in every dtype, in every order of addition.
    element = st.integers(0, 10)
    inputs = [
      data.draw(st_np.arrays(dtype, shape, elements=element))
      for _ in range(world_size)
    ]
    before = [array.copy() for array in inputs]
    outputs = simulate(ALGORITHMS[name](world_size), inputs).outputs
    self.assertLen(outputs, world_size)
    for output in outputs:
      self.assertIsInstance(output, np.ndarray)
      expected = np.asarray(sum(before[1:], before[0])).astype(dtype)
      np.testing.assert_array_equal(output, expected, strict=True)
    for array, copy in zip(inputs, before, strict=True):
      np.testing.assert_array_equal(array, copy, strict=True)
      self.assertFalse(any(np.shares_memory(array, o) for o in outputs))

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
  def random_inputs(self, world_size, length, dtype=np.float32):
    rng = np.random.default_rng(world_size * 100 + length)
    return [rng.normal(size=length).astype(dtype) for _ in range(world_size)]

  @parameterized.product(
    name=NAMES,
    codec=('float16', 'bfloat16'),
    world_size=(1, 2, 5, 8),
  )
  def test_ranks_agree_and_are_near_the_sum(self, name, codec, world_size):
    inputs = self.random_inputs(world_size, 37)
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
    bound = 1.01 * unit * (world_size if world_size > 1 else 0) * size
    np.testing.assert_array_less(error, bound + 1e-6)

  @pytest.mark.smoke
  def test_sums_are_made_in_float32(self):
    # 256 + 1 is no bfloat16: summing in it would lose all 16 additions.
    inputs = [np.float32([256])] + [np.float32([1])] * 16
    output = simulate(naive_all_reduce(17), inputs, 'bfloat16').outputs[3]
    self.assertEqual(output.item(), 272)

  def test_sum_beyond_float16_is_infinite_not_wrong(self):
    inputs = [np.float32([40000])] * 2
    for output in simulate(ring_all_reduce(2), inputs, 'float16').outputs:
      self.assertEqual(output.item(), np.inf)


if __name__ == '__main__':
  absltest.main()
