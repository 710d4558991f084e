"""Variables are spread over servers evenly by bytes."""

from unittest import mock

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tests import docstrings
from tf_strategies.strategies.parameter_server import extended, partitioned


class PlacementTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(extended, 'SPREAD_BYTES', 1))

  def test_examples_run(self):
    docstrings.assert_examples(self, partitioned.__name__, 2)

  @pytest.mark.smoke
  def test_kernels_do_not_all_land_on_one_server(self):
    # Kernel, bias, kernel, bias: in turn, every kernel is on server 0.
    sizes = [4000, 40, 4000, 40, 4000, 40, 4000, 40]
    found = extended.Placement(2)
    servers = [found.place(size) for size in sizes]
    self.assertEqual(found.load, (8080, 8080))
    self.assertCountEqual(servers[::2], [0, 0, 1, 1])

  @hypothesis.given(
    st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 7)
  )
  def test_the_fullest_holds_at_most_the_mean_and_the_largest(self, sizes, n):
    found = extended.Placement(n)
    loads = [0] * n
    for size in sizes:
      loads[found.place(size)] += size
    self.assertEqual(found.load, tuple(loads))
    self.assertLessEqual(max(loads), sum(sizes) / n + max(sizes, default=0))

  def test_scalars_are_on_server_0_however_full_it_is(self):
    found = extended.Placement(3)
    found.place(10**6)
    self.assertEqual(
      [found.place(8, is_scalar=True) for _ in range(4)], [0] * 4
    )
    self.assertEqual(found.load, (10**6 + 32, 0, 0))


class PartitionTest(parameterized.TestCase):
  @hypothesis.given(st.integers(1, 1000), st.integers(1, 50))
  def test_parts_are_even_and_whole(self, rows, parts):
    sizes = partitioned.partition_sizes(rows, parts)
    self.assertLen(sizes, min(rows, parts))
    self.assertEqual(sum(sizes), rows)
    self.assertGreater(min(sizes), 0)
    self.assertLessEqual(max(sizes) - min(sizes), 1)
    self.assertEqual(list(sizes), sorted(sizes, reverse=True))

  @hypothesis.given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
  def test_offsets_are_where_parts_begin(self, sizes):
    rows = [i for i, size in enumerate(sizes) for _ in range(size)]
    found = partitioned.offsets(sizes)
    self.assertEqual([rows.index(i) for i in range(len(sizes))], list(found))


if __name__ == '__main__':
  absltest.main()
