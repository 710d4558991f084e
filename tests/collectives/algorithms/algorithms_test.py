"""Exact sums, bytes and rounds of every algorithm."""

import numpy as np
from absl.testing import absltest, parameterized

from tests.collectives import proof
from tests.collectives.simulator import simulate
from tf_strategies import errors
from tf_strategies.collectives import algorithms
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.collectives.algorithms.hierarchical import (
  hierarchical_all_reduce,
)
from tf_strategies.collectives.schedule import chunk_sizes

MAX_WORLD_SIZE = 17


def lengths(world_size):
  edges = {0, 1, world_size - 1, world_size, world_size + 1}
  return sorted(edges | {2, 7, 13, 31, 97, 6 * world_size})


def divisors(number):
  return [d for d in range(1, number + 1) if number % d == 0]


def all_schedules(name):
  """Yields the schedules of an algorithm for all tested world sizes."""
  for world_size in range(1, MAX_WORLD_SIZE + 1):
    if name == 'hierarchical':
      for group_size in divisors(world_size):
        yield hierarchical_all_reduce(world_size, group_size)
    else:
      yield ALGORITHMS[name](world_size)


def distinct_inputs(world_size, length):
  """Returns arrays that differ by rank and position."""
  return [rank * 1000 + np.arange(length) for rank in range(world_size)]


class EveryAlgorithmTest(parameterized.TestCase):
  @parameterized.parameters(*ALGORITHMS)
  def test_every_rank_gets_the_exact_sum(self, name):
    for schedule in all_schedules(name):
      proof.validate(schedule)
      for length in lengths(schedule.world_size):
        inputs = distinct_inputs(schedule.world_size, length)
        expected = [np.sum(inputs, axis=0)] * schedule.world_size
        outputs = simulate(schedule, inputs).outputs
        np.testing.assert_array_equal(outputs, expected, strict=True)

  @parameterized.parameters(*ALGORITHMS)
  def test_reduce_scatter_half_gives_each_rank_its_chunk(self, name):
    for schedule in all_schedules(name):
      n = schedule.world_size
      try:
        half = schedule.reduce_scatter()
      except errors.ScheduleError:
        self.assertTrue(
          schedule.num_chunks != n or sorted(schedule.owners()) != [*range(n)]
        )
        continue
      self.assertEqual(half.owners(), tuple(range(n)))
      self.assertLessEqual(2 * len(half.transfers), len(schedule.transfers))
      inputs = distinct_inputs(n, 3 * n + 1)
      ends = np.cumsum((0, *chunk_sizes(3 * n + 1, n)))
      for rank, output in enumerate(simulate(half, inputs).outputs):
        mine = slice(ends[rank], ends[rank + 1])
        np.testing.assert_array_equal(
          output[mine], np.sum(inputs, axis=0)[mine]
        )


class CostTest(parameterized.TestCase):
  def test_rounds(self):
    for n in range(1, MAX_WORLD_SIZE + 1):
      log_up, log_down = (n - 1).bit_length(), n.bit_length() - 1
      several = n > 1
      power_of_two = n & (n - 1) == 0
      expected = {
        'ring': 2 * (n - 1),
        'naive': 2 * several,
        'direct': 2 * several,
        'one_shot': 1 * several,
        'tree': 2 * log_up,
        'halving_doubling': 2 * log_down + (0 if power_of_two else 2),
      }
      for name, num_rounds in expected.items():
        self.assertEqual(ALGORITHMS[name](n).num_rounds, num_rounds, (name, n))
      for g in divisors(n):
        found = hierarchical_all_reduce(n, g).num_rounds
        self.assertEqual(found, 2 * (g - 1) + 2 * (n // g - 1), (n, g))

  @parameterized.parameters(2, 4, 8, 16)
  def test_bandwidth_bound_is_reached(self, n):
    bound = 2 * (n - 1) * 5  # 2 (N - 1) / N * L bytes for L = 5 N.
    for name in ('ring', 'halving_doubling', 'direct', 'hierarchical'):
      schedule = ALGORITHMS[name](n)
      sizes = chunk_sizes(5 * n, schedule.num_chunks)
      self.assertEqual(schedule.bytes_in(sizes), (bound,) * n, name)


class NamesTest(parameterized.TestCase):
  @parameterized.parameters('ring(2)', 'hierarchical(0)', 'hierarchical(2')
  def test_invalid_names_are_refused(self, name):
    with self.assertRaises(errors.UnsupportedOptionError):
      algorithms.check(name)

  def test_group_size_must_divide_world_size(self):
    self.assertEqual(
      algorithms.build('hierarchical(3)', 12), hierarchical_all_reduce(12, 3)
    )
    with self.assertRaisesRegex(
      errors.ScheduleError,
      r'group_size .*world_size=12, got 5.*\[1, 2, 3, 4, 6, 12\]',
    ):
      algorithms.build('hierarchical(5)', 12)


if __name__ == '__main__':
  absltest.main()
