"""The examples in docstrings give the documented results."""

from absl.testing import absltest, parameterized

from tests import docstrings


class DocumentationTest(parameterized.TestCase):
  # Excludes the commands, because their flags would collide in one process.
  @parameterized.parameters(
    ('measure', 2),
    ('peers', 4),
    ('process_results', 2),
    ('report', 1),
    ('network_namespaces', 1),
    ('process_peers.base', 2),
    ('parameter_server_peers.jobs', 1),
    ('parameter_server_peers.results', 3),
    ('strategy_costs.catalogue', 3),
    ('input_pipeline.epoch', 1),
    ('input_pipeline.timeline', 1),
    ('input_pipeline.timeline_svg', 1),
    ('input_pipeline.variants', 1),
  )
  def test_examples(self, name, least):
    docstrings.assert_examples(self, f'benchmarks.{name}', least)


if __name__ == '__main__':
  absltest.main()
