"""The examples in docstrings give the results that they show."""

from absl.testing import absltest, parameterized

from tests import docstrings


class DocumentationTest(parameterized.TestCase):
  # Excludes the commands, because their flags would collide in one process.
  @parameterized.parameters(
    ('benchmarks.measure', 2),
    ('benchmarks.process_results', 2),
    ('benchmarks.report', 1),
    ('benchmarks.network_namespaces', 1),
    ('benchmarks.process_peers.base', 2),
  )
  def test_examples(self, name, least):
    docstrings.assert_examples(self, name, least)


if __name__ == '__main__':
  absltest.main()
