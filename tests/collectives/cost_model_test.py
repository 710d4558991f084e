"""Modelled times equal closed formulas, and the cheapest algorithm is chosen."""

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.collectives.algorithms.hierarchical import (
  hierarchical_all_reduce,
)
from tf_strategies.collectives.cost_model import (
  CANDIDATES,
  Link,
  Topology,
  choose,
  cost,
)
from tf_strategies.collectives.schedule import Schedule, Transfer

# Sockets on a fast network: 50 us, 1 GB/s.
SOCKETS = Link(5e-5, 1e-9)


class FormulaTest(parameterized.TestCase):
  @parameterized.parameters((4, 2), (12, 4))
  def test_hierarchical_cost_on_two_levels(self, n, g):
    near, far, size = Link(1e-6, 1e-11), Link(1e-4, 1e-9), 1000 * n
    topology = Topology(n, near, far, g)
    groups = n // g
    expected = 2 * (g - 1) * near.seconds(size // g)
    # The ranks of a group share its link.
    expected += 2 * (groups - 1) * far.seconds(g * size // n)
    seconds = cost(hierarchical_all_reduce(n, g), size, topology)
    self.assertAlmostEqual(seconds / expected, 1.0, delta=1e-9)

  def test_only_sending_and_receiving_overlap(self):
    topology = Topology(3, Link(1.0, 0.0))
    swap = (Transfer(0, 0, 1, 0, True), Transfer(0, 1, 0, 0, True))
    both = (Transfer(0, 0, 1, 0, False), Transfer(0, 0, 2, 0, False))
    gather = (Transfer(0, 1, 0, 0, True), Transfer(0, 2, 0, 0, True))
    for transfers, expected in ((swap, 1.0), (both, 2.0), (gather, 2.0)):
      self.assertEqual(
        cost(Schedule('test', 3, 1, transfers), 8, topology), expected
      )

  def test_chunks_between_two_ranks_are_one_message(self):
    two = tuple(Transfer(0, 0, 1, chunk, True) for chunk in (0, 1))
    topology = Topology(2, Link(10.0, 1.0))
    self.assertEqual(cost(Schedule('test', 2, 2, two), 8, topology), 18.0)


class ChooseTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None)
  @hypothesis.given(
    n=st.integers(4, 17),
    num_bytes=st.integers(0, 10**10),
    alpha=st.floats(1e-7, 1e-3),
    beta=st.floats(1e-12, 1e-7),
  )
  def test_cheapest_algorithm_but_not_naive_is_chosen(
    self, n, num_bytes, alpha, beta
  ):
    topology = Topology(n, Link(alpha, beta))
    chosen = choose(num_bytes, topology)
    self.assertNotEqual(chosen.name, 'naive')
    cheapest = min(
      cost(ALGORITHMS[c](n), num_bytes, topology) for c in CANDIDATES
    )
    self.assertLessEqual(
      cost(chosen, num_bytes, topology), cheapest * (1 + 1e-8)
    )

  def test_first_of_equal_costs_is_chosen(self):
    topology = Topology(8, SOCKETS)
    for names in (['ring', 'direct'], ['direct', 'ring']):
      self.assertEqual(choose(8000, topology, names).name, names[0])
    self.assertEqual(choose(8, Topology(1, SOCKETS)).name, 'ring')
    # These costs tie although their sums round differently.
    odd = Topology(7, Link(0.1, 0.3))
    self.assertEqual(choose(7001, odd, ['direct', 'ring']).name, 'direct')


if __name__ == '__main__':
  absltest.main()
