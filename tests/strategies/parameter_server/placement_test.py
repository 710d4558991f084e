"""Variables are spread over servers evenly by bytes."""

import types
from unittest import mock

import hypothesis
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tests import docstrings
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import extended, partitioned


class PlacementTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(extended, 'SPREAD_BYTES', 1))

  def test_examples_run(self):
    docstrings.assert_examples(self, partitioned.__name__, 2)

  @hypothesis.given(
    st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 7)
  )
  @pytest.mark.smoke
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
  def num_parts(self, found, shape=(6, 4)):
    """Returns the number of parts if a partitioner returns `found`."""
    return extended.ParameterServerExtended._num_parts(
      types.SimpleNamespace(_partitioner=lambda shape, dtype: found),
      *(shape, 'float32', 'matrix'),
    )

  @parameterized.named_parameters(
    ('text', 'two', "'two'"),
    ('number', 2, 'got 2 from variable_partitioner'),
    ('zero', [0, 1], r'\[0, 1\]'),
    ('float', [2.0, 1], r'\[2.0, 1\]'),
    ('second_axis', [1, 2], r'first axis only, got \[1, 2\]'),
    ('too_short', [2], r'\[2\]'),
  )
  def test_nonsense_of_a_partitioner_is_refused(self, found, message):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, f"{message}.*'matrix'"
    ):
      self.num_parts(found)

  def test_no_more_parts_than_rows(self):
    self.assertEqual(self.num_parts([100, 1]), 6)
    self.assertEqual(self.num_parts([2], shape=()), 1)

  @hypothesis.given(st.integers(1, 1000), st.integers(1, 50))
  def test_parts_are_even_and_whole(self, rows, parts):
    sizes = partitioned.partition_sizes(rows, parts)
    self.assertLen(sizes, min(rows, parts))
    self.assertEqual(sum(sizes), rows)
    self.assertGreater(min(sizes), 0)
    self.assertLessEqual(max(sizes) - min(sizes), 1)
    self.assertEqual(list(sizes), sorted(sizes, reverse=True))


if __name__ == '__main__':
  absltest.main()
