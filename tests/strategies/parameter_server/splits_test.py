"""What a source keeps of the splits that it hands out."""

import collections
import gc
import weakref

import tensorflow as tf
from absl.testing import parameterized

from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.parameter_server import (
  input,
  splits,
)


class _Dataset(input.WorkerDataset):
  """Five batches in two splits, of which handles are numbers."""

  def __init__(self, by_rounds=False):
    data = tf.data.Dataset.range(5).batch(1)
    super().__init__(
      lambda c: data.shard(2, c.input_pipeline_id),
      2,
      list,
      by_rounds=by_rounds,
    )

  def open(self, split, start, worker, life):
    return tf.constant(split.index)


class SourceTest(tf.test.TestCase, parameterized.TestCase):
  def _read_to_end(self, source):
    """Returns the iterator of a split that has been read to its end."""

    def end(handle):
      raise tf.errors.OutOfRangeError(None, None, 'End of sequence')

    lives = collections.Counter()
    split = source.split_for(0, [], lives, source.splits)
    handle = split.handle
    self.assertFalse(source.read(split, 0, lives, end))
    return handle

  def test_iterator_is_forgotten_when_it_was_read(self):
    source = splits.Source(_Dataset())
    handle = weakref.ref(self._read_to_end(source))
    gc.collect()
    self.assertIsNone(handle())

  def test_steps_of_a_resumed_epoch(self):
    source = splits.Source(_Dataset(), Position(1, 3, (2, 1)))
    begun = [source.may_begin_step() for _ in range(6)]
    # Three are dropped, and two are left.
    self.assertEqual(begun, [True] * 5 + [False])

  def test_position_at_the_end_of_an_epoch_within_the_data(self):
    """Checks that the next epoch continues after the last element trained on."""
    source = splits.Source(_Dataset())
    for _ in range(3):
      source.may_begin_step()
    for split, done in zip(source.splits, (2, 1), strict=True):
      split.done = done
    self.assertEqual(source.position, (2, 1))
    source = splits.Source(_Dataset(), Position(1, 0, source.position))
    begun = [source.may_begin_step() for _ in range(3)]
    self.assertEqual(begun, [True, True, False])
    self.assertEqual(source.position, ())

  def test_steps_of_rounds(self):
    """Checks that the longest split sets the number of steps, also after a resume."""
    source = splits.Source(_Dataset(True))
    self.assertEqual(
      [source.may_begin_step() for _ in range(4)], [True] * 3 + [False]
    )
    source = splits.Source(_Dataset(True), Position(1, 1, (2, 2)))
    # Of two that are done one was of an epoch before; one is left.
    self.assertEqual(
      [source.may_begin_step() for _ in range(3)], [True, True, False]
    )


if __name__ == '__main__':
  tf.test.main()
