"""The examples in docstrings do what they say."""

import doctest
import importlib

from absl.testing import absltest, parameterized


class DocumentationTest(parameterized.TestCase):
  # Not the commands: their flags would meet in one process.
  @parameterized.parameters(
    ('benchmarks.measure', 2),
    ('benchmarks.process_results', 4),
    ('benchmarks.test_hosts', 1),
    ('benchmarks.process_peers.base', 2),
  )
  def test_examples(self, name, least):
    found = doctest.testmod(
      importlib.import_module(name), optionflags=doctest.ELLIPSIS
    )
    self.assertEqual(found.failed, 0)
    self.assertGreaterEqual(found.attempted, least)


if __name__ == '__main__':
  absltest.main()
