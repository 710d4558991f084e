"""The trainer's idle time is measured and drawn."""

import time

import tensorflow as tf

from benchmarks.input_pipeline import timeline
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


if __name__ == '__main__':
  tf.test.main()
