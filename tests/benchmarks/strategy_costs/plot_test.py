"""The picture shows every configuration, labelled with units."""

import importlib.util
import os
from unittest import mock

from absl.testing import absltest

from benchmarks.strategy_costs import catalogue, plot, results
from tests.benchmarks.strategy_costs import made_up
from tf_strategies import errors


def rows():
  """Two configurations, one with two rounds, and one that failed."""
  runs = [
    results.measured(
      catalogue.configuration('ring_1'),
      made_up.finished(made_up.report(examples_per_second=rate)),
    )
    for rate in (5000.0, 7000.0)
  ]
  return [
    results.Rows(catalogue.configuration('ring_1'), runs),
    results.Rows(catalogue.configuration('ring_2'), runs[:1]),
    results.Rows(catalogue.configuration('ring_4'), [], 'it failed'),
  ]


class PlotTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    if importlib.util.find_spec('matplotlib') is None:
      self.skipTest('matplotlib is not installed')

  def test_panels(self):
    speed, loss = plot.draw(rows(), 0.15, 'Digits').axes
    self.assertEqual(
      [bar.get_width() for bar in speed.patches], [6000.0, 5000.0]
    )
    names = [label.get_text() for label in speed.get_yticklabels()]
    self.assertEqual(names, ['ring_1', 'ring_2'])
    self.assertEqual(speed.get_xlabel(), 'speed (images/s)')
    *curves, target = loss.lines
    self.assertLen(curves, 3)
    for curve in curves:
      self.assertEqual(
        [list(point) for point in curve.get_xydata()],
        made_up.report()['curve'],
      )
    self.assertEqual(list(target.get_ydata()), [0.15, 0.15])
    self.assertEqual(loss.get_xlabel(), 'training time (s)')
    self.assertIn('test loss', loss.get_ylabel())
    self.assertEqual(
      [text.get_text() for text in loss.get_legend().get_texts()],
      ['ring_1', 'ring_2', 'target 0.15'],
    )

  def test_file(self):
    path = os.path.join(self.create_tempdir().full_path, 'a.png')
    plot.check_installed(path)
    plot.write(path, rows(), 0.15, 'Digits')
    with open(path, 'rb') as f:
      self.assertEqual(f.read(8), b'\x89PNG\r\n\x1a\n')

  def test_nothing_to_draw(self):
    speed, loss = plot.draw(rows()[2:], 0.15, 'Digits').axes
    self.assertEmpty(speed.patches)
    self.assertLen(loss.lines, 1)


class CheckTest(absltest.TestCase):
  def test_without_matplotlib(self):
    with (
      mock.patch.object(importlib.util, 'find_spec', lambda name: None),
      self.assertRaisesRegex(
        errors.UnsupportedOptionError, r"pip install '\.\[benchmarks"
      ),
    ):
      plot.check_installed('a.png')

  def test_other_format(self):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, "'a.pdf'"):
      plot.check_installed('a.pdf')

  def test_no_directory(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'mkdir -p /nowhere/at_all'
    ):
      plot.check_installed('/nowhere/at_all/a.png')


if __name__ == '__main__':
  absltest.main()
