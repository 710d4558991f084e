"""What a source keeps of the splits that it hands out."""

import collections
import gc
import weakref

import tensorflow as tf

from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.parameter_server import input, splits


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


class SourceTest(tf.test.TestCase):
  def test_iterator_is_forgotten_when_it_was_read(self):
    source, lives = splits.Source(_Dataset()), collections.Counter()
    split = source.split_for(0, [], lives, source.splits)
    handle = weakref.ref(split.handle)

    def end(handle):
      raise tf.errors.OutOfRangeError(None, None, 'End of sequence')

    self.assertFalse(source.read(split, 0, lives, end))
    gc.collect()
    self.assertIsNone(handle())

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

  def test_steps_of_rounds_after_a_resume(self):
    source = splits.Source(_Dataset(True), Position(1, 1, (2, 2)))
    # Of two that are done one was of an epoch before; one is left.
    begun = [source.may_begin_step() for _ in range(3)]
    self.assertEqual(begun, [True, True, False])


if __name__ == '__main__':
  tf.test.main()
