"""The trainer's idle time is measured and drawn."""

import time
from xml.etree import ElementTree

import tensorflow as tf

from benchmarks.input_pipeline import timeline, timeline_svg
from tests.data import formula
from tf_strategies import errors

_SLOW_S = 0.02
_STEPS = 6


def _sleep(x):
  time.sleep(_SLOW_S)
  return x


def _record(prefetch):
  dataset = tf.data.Dataset.range(30).map(
    lambda x: tf.numpy_function(_sleep, [x], tf.int64)
  )
  return timeline.record(dataset, 1.5 * _SLOW_S, _STEPS, prefetch)


class TimelineTest(formula.DataTestCase):
  def test_prefetch_hides_the_preparation(self):
    naive, prefetched = _record(False), _record(True)
    # Preparation takes two of five parts. With prefetching, the wait is much
    # shorter.
    self.assertGreater(naive.idle_share, 0.2)
    self.assertLess(prefetched.idle_share, naive.idle_share / 2)

  def test_short_dataset_is_repeated_and_an_empty_one_refused(self):
    found = timeline.record(tf.data.Dataset.range(2), 0.001, _STEPS, True)
    self.assertLen(found.train, _STEPS)
    with self.assertRaisesRegex(errors.DataError, 'no batch'):
      timeline.record(tf.data.Dataset.range(0), 0.001, _STEPS, False)


class PictureTest(formula.DataTestCase):
  def setUp(self):
    super().setUp()
    # The second batch was ready before the first step in the picture.
    self.timelines = {
      'naive': timeline.Timeline(
        [(0.0, 0.1), (0.3, 0.4)], [(0.1, 0.3), (0.4, 0.6)], 0.6, 1 / 3
      ),
      'fast & < ready': timeline.Timeline(
        [(-0.2, -0.1), (-0.1, 0.1)], [(0.0, 0.2), (0.2, 0.4)], 0.4, 0.0
      ),
    }

  def test_picture_stands_alone(self):
    picture = timeline_svg.render(self.timelines, 'A title')
    for words in ('A title', 'naive: trainer idle 33%', 'trainer idle 0%'):
      self.assertIn(words, picture)
    for words in ('<script', 'src=', 'url('):
      self.assertNotIn(words, picture)
    found = ElementTree.fromstring(picture).iter(
      '{http://www.w3.org/2000/svg}rect'
    )
    boxes = [e.get('class') for e in found]
    self.assertEqual(boxes.count('train'), 4)
    self.assertEqual(boxes.count('idle'), 2)
    self.assertEqual(boxes.count('prep'), 3)


if __name__ == '__main__':
  tf.test.main()
