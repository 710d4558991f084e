"""What a source keeps of the splits that it hands out, and what rounds take."""

import gc
import weakref
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.parameter_server import (
  input,
  splits,
  worker_arrays,
  worker_pool,
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
  def test_iterator_is_forgotten_when_it_was_read(self):
    source = splits.Source(_Dataset())
    handle = weakref.ref(source.split_for(0, []).handle)
    source.close(0, source.splits[0])
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


class _Local(input.WorkerDataset):
  """Numbers of two workers: 0 to 3, and 10 to 11."""

  def __init__(self, has_known_size=True):
    def make(context):
      first = 10 * context.input_pipeline_id
      data = tf.data.Dataset.range(first, first + (2 if first else 4))
      return data if has_known_size else data.filter(lambda i: True)

    super().__init__(make, 2, list, by_rounds=True)


class RoundTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    local = mock.patch.object(
      worker_arrays, 'device', lambda worker: '/device:CPU:0'
    )
    local.start()
    self.addCleanup(local.stop)

  def _take(self, turn, worker, others):
    """The number that a worker reads in a round; None at the end of its split."""
    split = turn.take(worker, others, 0)
    spec = turn.source.dataset.element_spec

    def read(handle):
      [value] = tf.raw_ops.IteratorGetNext(
        iterator=handle, **input._types(spec)
      )
      return int(value)

    return turn.read(split, worker, 0, read)

  def _rounds(self, has_known_size):
    source, found = splits.Source(_Local(has_known_size)), []
    while len(found) < 9:
      turn = splits.Round(source)
      if not turn.elements:
        break
      read = []
      for worker in (1, 0):
        if turn.has_work_for(worker, [1 - worker]):
          read.append(self._take(turn, worker, [1 - worker]))
      turn.count()
      found.append(read)
    self.assertEqual([s.done for s in source.splits], [4, 2])
    return found

  def test_each_takes_an_element_until_the_end_of_all(self):
    both = [[10, 0], [11, 1]]
    self.assertEqual(self._rounds(True), [*both, [2], [3]])
    # The ends are found by those who read.
    unknown = [*both, [None, 2], [3], [None]]
    self.assertEqual(self._rounds(False), unknown)

  @pytest.mark.smoke
  def test_what_a_lost_worker_had_taken_another_one_reads(self):
    source = splits.Source(_Local())
    first = splits.Round(source)
    self._take(first, 0, [1])
    self._take(first, 1, [0])
    first.count()
    turn = splits.Round(source)
    self.assertEqual(self._take(turn, 0, [1]), 1)
    split = turn.take(1, [0], 0)

    def fail(handle):
      raise tf.errors.UnavailableError(None, None, 'the worker is gone')

    with self.assertRaises(tf.errors.UnavailableError):
      turn.read(split, 1, 0, fail)
    with self.assertRaises(worker_pool.NotHereError):
      turn.take(0, [1], 0)
    source.lose(1)
    self.assertEqual(self._take(turn, 0, []), 11)
    turn.count()
    self.assertEqual([s.done for s in source.splits], [2, 2])

  def test_late_worker_leaves_out_what_was_dropped(self):
    source = splits.Source(_Local())
    for number in range(3):
      turn = splits.Round(source)
      if number == 0:
        self.assertEqual(self._take(turn, 0, [1]), 0)
      turn.count()
    turn = splits.Round(source)
    self.assertEqual(self._take(turn, 0, [1]), 3)


if __name__ == '__main__':
  tf.test.main()
