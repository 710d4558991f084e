"""Our strategies give the right results for public bug reports of TensorFlow's."""

import functools

import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from tests import tiers, virtual_devices
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


def _rows(*setups):
  return [
    (exhibit.report.replace('#', '_'), exhibit)
    for exhibit in exhibits.EXHIBITS
    if exhibit.setup in setups
  ]


def _mark(row):
  if row[1].report in _SMOKE:
    return tiers.smoke(row)
  return tiers.soak(row) if row[1].report in _SLOW else row


@functools.cache
def _one_device(exhibit):
  return exhibits.run(exhibit)


class MuseumTest(tf.test.TestCase, parameterized.TestCase):
  def assert_correct(self, exhibit, strategy):
    """Checks that a strategy gives the same results as one device."""
    self.assertEqual(strategy.num_replicas_in_sync, exhibit.replicas)
    found = exhibits.run(exhibit, strategy)
    self.assertEmpty(exhibits.fault(exhibit, _one_device(exhibit), found))

  @tiers.named_parameters(*map(_mark, _rows('devices')))
  def test_replicas_equal_one_device(self, exhibit):
    self.assert_correct(exhibit, running.create(exhibit, running.OURS))

  @parameterized.named_parameters(*_rows('devices'))
  @pytest.mark.soak
  def test_central_storage_equals_one_device(self, exhibit):
    devices = virtual_devices.names(exhibit.replicas)
    strategy = tfs.create_strategy('central_storage', devices=devices)
    self.assert_correct(exhibit, strategy)

  @parameterized.named_parameters(
    *_rows('workers', 'servers', 'missing_worker')
  )
  @pytest.mark.soak
  def test_processes_equal_one_device(self, exhibit):
    finding = running.find(exhibit, running.OURS, _DEADLINE_SECONDS)
    self.assertTrue(finding.is_right, finding.text)


class PageTest(absltest.TestCase):
  def test_page_is_up_to_date(self):
    page = _PAGE.read_text(encoding='utf-8')
    cells = run.read(page)
    self.assertEqual(run.write(cells), page)
    self.assertCountEqual(cells, [e.report for e in exhibits.EXHIBITS])

  def test_all_results_of_ours_are_right(self):
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


if __name__ == '__main__':
  tf.test.main()
