"""Tables and sentences about measurements agree with the reports."""

import re

import pytest
from absl.testing import absltest, parameterized

from tests import docstrings
from tools.pages import claims, measurements


class TablesTest(parameterized.TestCase):
  @parameterized.parameters('measurements', 'measured_tables', 'claims')
  def test_examples_run(self, name):
    docstrings.assert_examples(self, f'tools.pages.{name}')


class ClaimsTest(absltest.TestCase):
  def test_missing_sentence_or_figures_are_reported(self):
    [claim] = [c for c in claims.CLAIMS if c.report == 'recovery']
    reports = {'recovery': {'results': []}}
    for text, words in (
      ('', 'no sentence'),
      (claim.words.replace('#', '1'), 'has no figures'),
    ):
      [found] = claims.problems(text, reports)
      self.assertIn(words, found)


@pytest.mark.smoke
class DocumentsTest(absltest.TestCase):
  """The documents of this checkout, which `make measurements` updates."""

  def test_tools_do_not_load_tensorflow(self):
    docstrings.assert_imports_load_none(
      self,
      ['tools.pages.measurements', 'tools.pages.hooks'],
      ['tensorflow', 'keras', 'absl'],
    )

  def test_tables_match_the_reports(self):
    made = measurements.blocks(measurements.read(measurements.RESULTS))
    shown = []
    for path, text in measurements.documents().items():
      shown += measurements.names(text)
      with self.subTest(path.name):
        self.assertEqual(measurements.filled(text, made), text)
    self.assertContainsSubset({*made}, {*shown})
    self.assertLen({*shown}, len(shown), 'a block appears twice')

  def test_sentences_match_the_reports(self):
    reports = measurements.read(measurements.RESULTS)
    [text] = [
      text
      for path, text in measurements.documents().items()
      if path.as_posix().endswith(claims.DOCUMENT)
    ]
    self.assertEmpty(claims.problems(text, reports))
    for claim in claims.CLAIMS:
      with self.subTest(claim.words):
        self.assertNotIn('no sentence', claim.problem(text, {}))

  def test_commands_write_the_reports_of_all_blocks(self):
    """Checks that the documented commands write exactly the reports that the
    blocks show.
    """
    documents = measurements.documents()
    shown = {n for t in documents.values() for n in measurements.names(t)}
    text = ' '.join(documents.values())
    written = re.findall(r'--report_json=benchmarks/results/(\w+)\.json', text)
    self.assertEqual({*written}, shown)


if __name__ == '__main__':
  absltest.main()
