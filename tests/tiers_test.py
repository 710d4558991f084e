"""Marks of single rows reach the tests that absl makes of them."""

import ast
import pathlib
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from tests import conftest, tiers


def _make_cases():
  # In a function, where pytest does not collect it.
  class Cases(parameterized.TestCase):
    @tiers.parameters(1, tiers.full(2), tiers.soak(3, 4))
    def test_by_position(self, *values):
      self.fail('a sample, which nothing runs')

    @tiers.named_parameters(
      ('one', 1),
      tiers.full('two', 2),
      tiers.soak({'testcase_name': '_three', 'value': 3}),
    )
    def test_by_name(self, value):
      self.fail('a sample, which nothing runs')

    @tiers.product(
      [{'kind': 'a'}, tiers.full({'kind': 'b'})], size=(1, tiers.soak(2))
    )
    def test_product(self, kind, size):
      self.assertIn(size, (1, 2))
      self.seen = (kind, size)

    @tiers.named_parameters(
      *tiers.few([('a', 1), ('b', 2), tiers.soak('c', 3)], 'b')
    )
    def test_few(self, value):
      self.fail('a sample, which nothing runs')

    @tiers.named_parameters(
      *tiers.few([('a', 1), ('b', 2), tiers.full('c', 3)], 'b', rest=tiers.soak)
    )
    def test_soaked(self, value):
      self.fail('a sample, which nothing runs')

    @parameterized.parameters(1, 2)
    def test_unmarked(self, value):
      self.fail('a sample, which nothing runs')

  return Cases


def _marks(prefix):
  cases = _make_cases()
  return {
    name.removeprefix(prefix): tiers.mark_of(getattr(cases, name), name)
    for name in dir(cases)
    if name.startswith(prefix)
  }


def _marks_of_nothing(source):
  """Names of tests with a mark above what makes several of them: it marks none."""
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef):
      decorators = [ast.unparse(each) for each in node.decorator_list]
      makes = [d.startswith(('parameterized.', 'tiers.')) for d in decorators]
      marks = [d.startswith('pytest.mark.') for d in decorators]
      if any(marks[: makes.index(True)] if any(makes) else ()):
        found.append(node.name)
  return found


class TiersTest(parameterized.TestCase):
  @pytest.mark.full
  def test_marks_are_where_they_count(self):
    lines = '@pytest.mark.full', '@tiers.parameters(1, 2)', 'def test(): pass'
    self.assertEqual(_marks_of_nothing('\n'.join(lines)), ['test'])
    lines = lines[1], lines[0], lines[2]
    self.assertEqual(_marks_of_nothing('\n'.join(lines)), [])
    for path in pathlib.Path(__file__).parent.rglob('*_test.py'):
      found = _marks_of_nothing(path.read_text())
      self.assertEqual(found, [], path)

  def test_rows_by_position(self):
    self.assertEqual(
      _marks('test_by_position'), {'0': None, '1': 'full', '2': 'soak'}
    )

  def test_rows_by_name(self):
    self.assertEqual(
      _marks('test_by_name'),
      {'_one': None, '_two': 'full', '_three': 'soak'},
    )

  def test_combination_has_the_latest_tier_of_its_parts(self):
    self.assertEqual(
      _marks('test_product'),
      {'0': None, '1': 'soak', '2': 'full', '3': 'soak'},
    )

  def test_few_of_a_table(self):
    self.assertEqual(
      _marks('test_few'), {'_a': 'full', '_b': None, '_c': 'soak'}
    )

  def test_few_whose_rest_is_for_the_soak(self):
    self.assertEqual(
      _marks('test_soaked'), {'_a': 'soak', '_b': None, '_c': 'soak'}
    )

  def test_name_that_is_in_no_row(self):
    with self.assertRaisesRegex(ValueError, 'rung'):
      tiers.few(['ring', 'tree'], 'ring', 'rung')

  def test_rows_are_passed_as_they_are(self):
    case = _make_cases()('test_product2')
    case.test_product2()
    self.assertEqual(case.seen, ('b', 1))

  def test_no_marks_without_a_decorator_of_this_module(self):
    self.assertEqual(_marks('test_unmarked'), {'0': None, '1': None})

  def test_the_later_of_two_marks_counts(self):
    @tiers.parameters(tiers.full(tiers.soak('a')), tiers.soak(tiers.full('b')))
    def test_twice(self, value):
      self.fail('a sample, which nothing runs')

    iterator = iter(test_twice)
    marks = [tiers.mark_of(next(iterator), f'test_twice{i}') for i in range(2)]
    self.assertEqual(marks, ['soak', 'soak'])

  def test_a_directory_named_like_a_mark_skips_nothing(self):
    item = mock.Mock(function=None, keywords={'soak': True})
    item.name = 'test_something'
    item.get_closest_marker.return_value = None
    config = mock.Mock()
    config.getoption.return_value = None
    conftest.pytest_collection_modifyitems(config, [item])
    item.add_marker.assert_not_called()


if __name__ == '__main__':
  absltest.main()
