"""Our strategies give the right results for reported faults of TensorFlow's."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.architecture import project
from tests.museum import exhibits, run, running

_PAGE = project.root() / 'docs' / 'museum.md'
_DEADLINE_SECONDS = 150.0
_SMOKE = ('keras#19891', 'keras#20582')
# XLA compiles for each replica, or the model is large.
_SLOW = (
  'keras#18110',
  'keras#20763',
  'keras#21069',
  'keras#21366',
  'tensorflow#62915',
  'tensorflow#90686',
)


def _rows(*places):
  return [
    (exhibit.report.replace('#', '_'), exhibit)
    for exhibit in exhibits.EXHIBITS
    if exhibit.place in places
  ]


def _mark(row):
  if row[1].report in _SMOKE:
    return tiers.smoke(row)
  return tiers.soak(row) if row[1].report in _SLOW else row


@functools.cache
def _one_device(exhibit):
  return exhibits.run(exhibit)


class MuseumTest(tf.test.TestCase, parameterized.TestCase):
  def assert_right(self, exhibit, strategy):
    """Checks that a strategy gives the same results as one device."""
    self.assertEqual(strategy.num_replicas_in_sync, exhibit.replicas)
    found = exhibits.run(exhibit, strategy)
    self.assertEmpty(exhibits.fault(exhibit, _one_device(exhibit), found))

  @tiers.named_parameters(*map(_mark, _rows('devices')))
  def test_devices(self, exhibit):
    self.assert_right(exhibit, running.create(exhibit, running.OURS))

  @parameterized.named_parameters(*_rows('devices'))
  @pytest.mark.soak
  def test_central_variables(self, exhibit):
    devices = virtual_devices.names(exhibit.replicas)
    strategy = tfs.create_strategy('central_storage', devices=devices)
    self.assert_right(exhibit, strategy)

  @parameterized.named_parameters(*_rows('workers', 'servers', 'half'))
  @pytest.mark.soak
  def test_processes(self, exhibit):
    finding = running.find(exhibit, running.OURS, _DEADLINE_SECONDS)
    self.assertTrue(finding.is_right, finding.text)


class FindingTest(parameterized.TestCase):
  """`judge` tells every way in which a process can fail from a right result."""

  def judge(self, *outcomes, **options):
    exhibit = exhibits.Exhibit('keras#1', 'Nothing.', lambda s: s, **options)
    want = {'a': [1.0, 2.0]}
    return running.judge(exhibit, want, list(outcomes), 5.0)

  @parameterized.named_parameters(
    ('number', {'a': [1.0, 2.25]}, 'differs by 0.25'),
    ('nan', {'a': [1.0, np.nan]}, 'NaN or infinity'),
    ('shape', {'a': [1.0]}, 'other shapes'),
    ('nothing', None, 'dies with status 0'),
  )
  def test_wrong_value(self, value, text):
    right = processes.Outcome(0, 0, {'a': [1.0, 2.0]})
    found = self.judge(right, processes.Outcome(1, 0, value))
    self.assertEqual(found, running.Finding(False, text))

  def test_right_value(self):
    found = self.judge(processes.Outcome(0, 0, {'a': [1.0, 2.000001]}))
    self.assertEqual(found, running.Finding(True, 'right'))

  def test_late_and_dead_processes(self):
    late = processes.Outcome(0, None)
    dead = processes.Outcome(1, -11)
    found = self.judge(late, dead)
    self.assertFalse(found.is_right)
    self.assertEqual(
      found.text, 'dies with status -11; hangs (ended after 5 s)'
    )

  def test_error(self):
    text = 'Traceback:\n  File\na.b.OddError: of odd things\n  more: of it\n'
    outcome = processes.Outcome(0, 0, error_text=text)
    self.assertEqual(self.judge(outcome).text, 'raises `OddError`')
    self.assertFalse(self.judge(outcome).is_right)
    self.assertTrue(self.judge(outcome, error='OddError').is_right)
    right = processes.Outcome(0, 0, {'a': [1.0, 2.0]})
    self.assertFalse(self.judge(right, error='OddError').is_right)

  def test_growth(self):
    limit = {'most': 16.0}
    self.assertTrue(self.judge(processes.Outcome(0, 0, 15.0), **limit).is_right)
    found = self.judge(processes.Outcome(0, 0, 17.0), **limit)
    self.assertEqual(found, running.Finding(False, '17 > 16'))


class PageTest(absltest.TestCase):
  def test_page_is_what_the_exhibits_say(self):
    page = _PAGE.read_text(encoding='utf-8')
    cells = run.read(page)
    self.assertEqual(run.write(cells), page)
    self.assertCountEqual(cells, [e.report for e in exhibits.EXHIBITS])

  def test_ours_is_right_in_the_page(self):
    cells = run.read(_PAGE.read_text(encoding='utf-8'))
    ours = [
      text
      for row in cells.values()
      for column, text in row.items()
      if column.startswith('ours')
    ]
    self.assertGreaterEqual(len(ours), len(exhibits.EXHIBITS))
    for text in ours:
      self.assertStartsWith(text, 'right')

  def test_columns_of_other_versions_stay(self):
    before = run.titles('2.1.0', '3.0.0')
    after = run.titles(tf.__version__, keras.__version__)
    report = exhibits.EXHIBITS[0].report
    cells = run.read(run.write({report: {before[running.STOCK]: 'NaN'}}))
    cells[report][after[running.OURS]] = 'right'
    again = run.read(run.write(cells))
    self.assertEqual(
      again[report],
      {before[running.STOCK]: 'NaN', after[running.OURS]: 'right'},
    )
    self.assertEqual(run.read('# No table.'), {})


if __name__ == '__main__':
  tf.test.main()
