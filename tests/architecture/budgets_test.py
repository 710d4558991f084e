"""A budget of code for each package: to add code, remove other code.

A token is a name, a number, a string or an operator. Comments, docstrings and
layout do not count, so denser code gains nothing. `python -m
tests.architecture.budgets_test --sizes` prints the sizes.
"""

import ast
import collections
import functools
import io
import sys
import tokenize

from absl.testing import absltest, parameterized

from tests.architecture import project

# In tokens: the size when the budget was set, plus 2 percent.
_BUDGETS = {
  'benchmarks': 34_840,
  'tests': 260_000,
  'tf_strategies': 3_310,
  'tf_strategies/_keras_internal': 7_070,
  'tf_strategies/_tf_internal': 3_750,
  'tf_strategies/checkpoint': 5_420,
  'tf_strategies/cluster': 6_790,
  'tf_strategies/collectives': 2_730,
  'tf_strategies/cross_device': 4_610,
  'tf_strategies/data': 3_990,
  'tf_strategies/fault_tolerance': 10_580,
  'tf_strategies/keras': 9_520,
  'tf_strategies/kubernetes': 1_350,
  'tf_strategies/launch': 7_960,
  'tf_strategies/monitoring': 2_280,
  'tf_strategies/process_group': 25_620,
  'tf_strategies/spmd': 25_140,
  'tf_strategies/strategies': 58_230,
}
_NO_CODE = {
  tokenize.COMMENT,
  tokenize.NL,
  tokenize.NEWLINE,
  tokenize.INDENT,
  tokenize.DEDENT,
  tokenize.ENCODING,
  tokenize.ENDMARKER,
}


def tokens_of(source: str) -> int:
  """Returns the number of code tokens in a file."""
  documented = (
    ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
  )
  docstrings = {
    (node.body[0].lineno, node.body[0].col_offset)
    for node in ast.walk(ast.parse(source))
    if isinstance(node, documented)
    and ast.get_docstring(node, clean=False) is not None
  }
  found = tokenize.generate_tokens(io.StringIO(source).readline)
  return sum(
    t.type not in _NO_CODE and t.start not in docstrings for t in found
  )


@functools.cache
def sizes() -> collections.Counter:
  """Returns the number of tokens in each directory that may have a budget."""
  found = collections.Counter()
  for path, source in project.python_files(
    'tf_strategies', 'tests', 'benchmarks'
  ).items():
    root, *inside, _ = path.split('/')
    if root == 'tf_strategies':
      root = '/'.join([root, *inside[:1]])
    found[root] += tokens_of(source)
  return found


class BudgetsTest(parameterized.TestCase):
  @parameterized.parameters(*_BUDGETS)
  def test_package_is_within_its_budget(self, directory):
    self.assertBetween(
      sizes()[directory],
      1,
      _BUDGETS[directory],
      f'{directory} has grown. Remove code that it no longer needs.',
    )

  def test_every_package_has_a_budget(self):
    self.assertEqual(sizes().keys(), _BUDGETS.keys())


if __name__ == '__main__':
  if '--sizes' in sys.argv:
    for name, size in sizes().most_common():
      print(f'{size:8,} {name}')
  else:
    absltest.main()
