"""Tables and sentences about measurements agree with the reports."""

import functools
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
    tested = {
      content['benchmark'] for content in made_up_reports.REPORTS.values()
    }
    self.assertEqual(tested, set(measured_tables.TABLES))

  @parameterized.parameters(
    (
      'all_reduce',
      '4, 25 of a ResNet, 25 MB',
      # The fastest is the one that adds on a single device, with 16 ms.
      ['8.00', '12.0', '16.0', '20.0', '0.50', '1.67', '1.50', '0.800'],
    ),
    (
      'process_all_reduce',
      '2, 66 kB',
      ['2.00', '3.00', '5.00', '4.00', '6.00']
      + ['0.50', '0.40', '0.75', '0.50', '1.50'],
    ),
    # Ten of the reference's 30 ms.
    (
      'training_step',
      '`ring_8mb`',
      ['30.0', '27.0', '45.0', '0.60', '0.33', '60.0'],
    ),
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
    (
      'input_pipeline',
      '`make_dataset`',
      ['900,000', '900,000', '900,000', '30.0', '`naive_arrays`'],
    ),
  )
  def test_row(self, block, first, expected):
    made = measurements.blocks(made_up_reports.REPORTS)
    self.assertEqual(_rows(made[block])[first], expected)

  def test_machine_and_command(self):
    block = measurements.blocks(made_up_reports.REPORTS)['process_all_reduce']
    self.assertIn('```bash\npython -m benchmarks.it --rounds=2\n```', block)
    about = ' '.join(block.partition('| Processes')[0].split())
    self.assertIn(
      '3 x A Processor, 5 GiB, Python 3.11.4, TensorFlow 2.21.0, torch 2.13.0, '
      '2026-02-03, load average before 0.2. Without `ours_mpi`: There is no '
      'mpiexec: install MPICH.',
      about,
    )


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


class ClaimsTest(parameterized.TestCase):
  def _text(self, change=lambda figure: figure):
    """Returns a document with the figures of the reports above, or changed figures."""
    return '\n\n'.join(
      functools.reduce(
        lambda words, figure: words.replace('#', f'{change(figure):.2f}', 1),
        claim.figures(made_up_reports.REPORTS[claim.report]),
        claim.words.replace(' ', '\n', 3),
      )
      for claim in self._claims()
    )

  def _claims(self):
    return [c for c in claims.CLAIMS if c.report in made_up_reports.REPORTS]

  def test_right_sentences(self):
    self.assertLen(self._claims(), 5)
    self.assertEmpty(claims.problems(self._text(), made_up_reports.REPORTS))

  def test_figure_that_the_report_does_not_have(self):
    found = claims.problems(
      self._text(lambda f: f + 0.01), made_up_reports.REPORTS
    )
    self.assertLen(found, len(self._claims()))

  def test_sentence_that_is_gone(self):
    found = claims.problems(
      '', {'recovery': made_up_reports.REPORTS['recovery']}
    )
    self.assertLen(found, 1)
    self.assertIn('no sentence', found[0])

  def test_report_without_the_peer(self):
    content = made_up_reports.REPORTS['recovery']
    content = content | {'results': []}
    [found] = claims.problems(self._text(), {'recovery': content})
    self.assertIn('has no figures', found)


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
