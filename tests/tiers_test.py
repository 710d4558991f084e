"""Marks of single rows reach the tests that absl generates from them."""

import ast
import pathlib

import pytest
from absl.testing import absltest, parameterized


def _marks_without_effect(source):
  """Returns the tests with a mark above their parameters, where it has no effect."""
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
  def test_every_mark_has_an_effect(self):
    for path in pathlib.Path(__file__).parent.rglob('*_test.py'):
      self.assertEqual(_marks_without_effect(path.read_text()), [], path)


class SmokeTest(absltest.TestCase):
  @pytest.fixture(autouse=True)
  def _session(self, request):
    self.session = request.session

  @pytest.mark.smoke
  def test_make_test_has_150_to_300_cases(self):
    config = self.session.config
    if (
      config.args_source != config.ArgsSource.TESTPATHS or config.option.keyword
    ):
      self.skipTest('only some of the tests run')
    names = [
      i.nodeid for i in self.session.items if i.get_closest_marker('smoke')
    ]
    self.assertBetween(len(names), 150, 300)


if __name__ == '__main__':
  absltest.main()
