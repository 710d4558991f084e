"""Tables and sentences about measurements agree with the reports."""

import pathlib
import re

import pytest
from absl.testing import absltest, parameterized

from tests import docstrings
from tests.architecture import made_up_reports
from tf_strategies import errors
from tools.pages import claims, measured_tables, measurements


def _rows(block):
  """Returns the cells below the head of a block's table, by the first cell of
  each row.
  """
  lines = re.findall(r'^\| (.*) \|$', block, re.MULTILINE)
  cells = [[cell.strip() for cell in line.split(' | ')] for line in lines[2:]]
  return {row[0]: row[1:] for row in cells}


class TablesTest(parameterized.TestCase):
  @parameterized.parameters('measurements', 'measured_tables', 'claims')
  def test_examples_run(self, name):
    docstrings.assert_examples(self, f'tools.pages.{name}')

  def test_every_benchmark_with_a_table_is_tested(self):
    reports = measurements.read(measurements.RESULTS)
    reports.update(made_up_reports.REPORTS)
    tested = {content['benchmark'] for content in reports.values()}
    self.assertEqual(tested, set(measured_tables.TABLES))

  @parameterized.parameters(
    (
      'recovery',
      '`tfs.elastic`',
      ['7', '0.100', '0.200', '0.300', '0.400', '4.0', '6.0'],
    ),
    (
      'parameter_server',
      'convolutional',
      ['2', '10', '100.0 (99.0 to 101.0)', '150.0 (149.0 to 151.0)', '1.50']
      + ['70 of 450', '0 of 450'],
    ),
    (
      'strategies',
      '`ring_mirrored`',
      ['4 devices', '7,000', '', '0.64', '0.64', '1.28', '0.9877'],
    ),
    ('strategies', '`one_device`', ['1 device', 'failed', *5 * ['']]),
  )
  def test_row(self, block, first, expected):
    made = measurements.blocks(made_up_reports.REPORTS)
    self.assertEqual(_rows(made[block])[first], expected)


class MalformedTest(parameterized.TestCase):
  def _read(self, text):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / 'it.json').write_text(text)
    return measurements.blocks(measurements.read(directory))

  @parameterized.parameters(
    ('{"benchmark": "recovery"', 'no JSON'),
    ('[1]', 'a list'),
    ('{"benchmark": "of_nothing"}', "'of_nothing', of which"),
    ('{"benchmark": "recovery"}', "needs 'results'"),
  )
  def test_is_an_error_that_names_the_file(self, text, words):
    with self.assertRaisesRegex(errors.DataError, f'it.json.*{words}'):
      self._read(text)


class BlocksTest(absltest.TestCase):
  def test_only_blocks_with_a_report_are_written(self):
    text = (
      'a\n<!-- measured: b -->\n1\n<!-- /measured -->\n'
      '<!-- measured: c -->\n<!-- /measured -->\nd\n'
    )
    self.assertEqual(measurements.names(text), ['b', 'c'])
    self.assertEqual(measurements.filled(text, {}), text)
    written = measurements.filled(text, {'c': '2\n'})
    self.assertEqual(written, text.replace('c -->\n', 'c -->\n2\n'))
    self.assertEqual(measurements.filled(written, {'c': '2\n'}), written)

  def test_block_without_an_end(self):
    for text in (
      '<!-- measured: b -->\n1\n',
      '<!-- /measured -->\n',
      '<!-- measured: b -->\n<!-- measured: c -->\n1\n<!-- /measured -->\n',
    ):
      with self.subTest(text), self.assertRaises(errors.DataError):
        measurements.filled(text, {})


class ClaimsTest(absltest.TestCase):
  def test_what_is_wrong_is_told(self):
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

  def test_are_written_without_tensorflow(self):
    docstrings.assert_imports_load_none(
      self,
      ['tools.pages.measurements', 'tools.pages.hooks'],
      ['tensorflow', 'keras', 'absl'],
    )

  def test_are_those_of_the_reports(self):
    reports = measurements.read(measurements.RESULTS)
    made = measurements.blocks(reports)
    shown = []
    for path, text in measurements.documents().items():
      shown += measurements.names(text)
      with self.subTest(path.name):
        self.assertEqual(measurements.filled(text, made), text)
    self.assertContainsSubset({*made}, {*shown})
    self.assertLen({*shown}, len(shown), 'a block stands twice')

  def test_sentences_are_those_of_the_reports(self):
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

  def test_commands_make_what_is_shown(self):
    """Checks that each block has a command that writes its report, and the
    other way round.
    """
    documents = measurements.documents()
    shown = {n for t in documents.values() for n in measurements.names(t)}
    text = ' '.join(documents.values())
    written = re.findall(r'--report_json=benchmarks/results/(\w+)\.json', text)
    self.assertEqual({*written}, shown)


if __name__ == '__main__':
  absltest.main()
