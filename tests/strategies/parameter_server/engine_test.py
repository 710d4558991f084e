"""Engines: bounded staleness, reuse of slots, and steps whose shares are lost."""

import collections
import gc
import threading
import types
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from tests import processes
from tests.strategies.parameter_server import fakes
from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.parameter_server import (
  batch_message,
  input,
  options,
  splits,
  traced_step,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import engine as engine_lib

_DEADLINE_SECONDS = 20.0
_POWERS = traced_step.Powers([], [], {})
_STEP = engine_lib.Step(run=None, trains=True, optimizers=('an optimizer',))


def _make(kind, pool, *mode, **limits):
  chosen = options.ParameterServerOptions(*mode, **limits)
  return kind(pool, fakes.Recovery(), None, chosen)


class _Engine(engine_lib.Engine):
  """Calls a function of the test for each share of a step. Applies nothing."""

  compute = None

  def powers(self, step, structure):
    return _POWERS if step.trains else ''

  def function(self, step, layout):
    def function(worker, argument, slots):
      return self._run(worker, argument, slots if step.trains else None, layout)

    function.layout = types.SimpleNamespace(key='', specs={})
    function.powers = _POWERS if step.trains else None
    number = tf.TensorSpec([], tf.int64)
    outputs = () if step.trains else (number, number)
    function.traced = types.SimpleNamespace(
      outputs=traced_step.Outputs(outputs)
    )
    return function

  def _run(self, worker, argument, slots, layout):
    self.compute(worker)
    return []

  def apply_function(self, update, count):
    return self._apply if update.step.trains else None

  def _apply(self, slots):
    return []


class _ReadingEngine(_Engine):
  """Reads numbers. `applied` has the numbers of each step."""

  def _run(self, worker, handle, slots, layout):
    [number] = tf.raw_ops.IteratorGetNext(
      iterator=handle, **input._types(layout.structure)
    )
    if slots is not None:  # In training.
      slots.number = int(number)
      self.compute(worker, slots.number)
    return [tf.constant(worker), number]

  def _apply(self, slots):
    self.applied.append([each.number for each in slots])
    return super()._apply(slots)


class SyncEngineTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(
      mock.patch.object(input, 'device', lambda worker: '/device:CPU:0')
    )
    self.is_late = threading.Event()
    self.addCleanup(self.is_late.set)

  def _engine(self, num_workers, backup_workers, kind=_Engine):
    self.pool, self.liveness = fakes.pool(self, num_workers)
    return _make(kind, self.pool, 'sync', backup_workers=backup_workers)

  def _reading_engine(self, compute, sizes, backup_workers=0):
    """Returns an engine and data. Worker w reads 10 w, 10 w + 1, ..."""
    engine = self._engine(len(sizes), backup_workers, _ReadingEngine)
    engine.compute, engine.applied = compute, []

    def make(context):
      worker = context.input_pipeline_id
      first = 10 * worker
      return tf.data.Dataset.range(first, first + sizes[worker])

    dataset = input.WorkerDataset(make, len(sizes), list, by_rounds=True)
    return engine, splits.Source(dataset)

  def _lose(self, worker):
    self.liveness.dead_workers.add(worker)
    raise tf.errors.UnavailableError(None, None, 'the worker is gone')

  def _train(self, engine, steps):
    for _ in range(steps):
      engine.begin(_STEP, batch_message.Batch(np.arange(12, dtype=np.float32)))

  @parameterized.parameters(False, True)
  def test_late_share_of_a_lost_worker_is_dropped(self, returns):
    """Returns a share to the queue of a step that is already complete."""
    engine = self._engine(3, backup_workers=1)
    self.liveness.is_complete = lambda: returns
    is_taken, is_over = threading.Event(), threading.Event()

    def compute(worker):
      if worker != 2 or is_over.is_set():
        is_taken.wait(_DEADLINE_SECONDS)
        return
      is_taken.set()
      is_over.wait(_DEADLINE_SECONDS)
      self._lose(2)

    engine.compute = compute
    self._train(engine, 1)
    self.assertTrue(is_taken.is_set())
    is_over.set()
    self._train(engine, 5)
    self.pool.wait()
    self.assertEqual(engine.report()['steps'], 6)
    self.assertEqual(engine.report()['dropped'], 6)

  @pytest.mark.smoke
  def test_lost_share_does_not_wait_for_a_slow_worker(self):
    """Checks that a free worker computes it. A step needs two of three shares."""
    engine = self._engine(3, backup_workers=1)
    self.liveness.is_complete = lambda: False
    is_slow = threading.Event()
    self.addCleanup(is_slow.set)
    all_begun = threading.Barrier(3)
    first = set(range(3))

    def compute(worker):
      if worker in first:
        first.discard(worker)
        all_begun.wait(_DEADLINE_SECONDS)
        if worker == 1:
          self._lose(1)
        if worker == 2:
          is_slow.wait(3 * _DEADLINE_SECONDS)

    engine.compute = compute
    self._train(engine, 1)
    self.assertEqual(engine.report()['steps'], 1)

  def test_other_shares_of_a_failed_step_are_not_applied(self):
    engine = self._engine(3, backup_workers=1)
    may_end = threading.Event()
    self.addCleanup(may_end.set)

    def compute(worker):
      if worker == 2:
        raise ValueError('an error of the step')
      may_end.wait(_DEADLINE_SECONDS)

    engine.compute = compute
    with self.assertRaisesRegex(ValueError, 'an error of the step'):
      self._train(engine, 1)
    may_end.set()
    self.pool.forget()
    self.assertEqual(engine.report()['steps'], 0)

  @mock.patch.object(worker_pool, '_PAUSE_SECONDS', 0.1)
  def test_no_step_is_applied_during_a_reconnect(self):
    engine = self._engine(1, 0)
    begun, may_end = threading.Event(), threading.Event()
    self.addCleanup(may_end.set)
    engine.compute = lambda worker: [
      begun.set(),
      may_end.wait(_DEADLINE_SECONDS),
    ]
    training = threading.Thread(target=self._train, args=(engine, 1))
    training.start()
    self.assertTrue(begun.wait(_DEADLINE_SECONDS))
    with self.pool._pause():
      may_end.set()
      training.join(0.3)
      self.assertEqual(engine.report()['steps'], 0)
      # Other calls, such as those that end the pool, do not wait.
      asking = threading.Thread(target=self.pool.is_busy)
      asking.start()
      asking.join(1.0)
      self.assertFalse(asking.is_alive())
    training.join(_DEADLINE_SECONDS)
    self.assertEqual(engine.report()['steps'], 1)

  def test_results_lost_with_a_worker_are_computed_again(self):
    """Lets a worker die after its call, before its results are fetched."""
    engine, source = self._reading_engine(None, (4, 3, 2))
    run, died = engine._run, []

    def run_once(worker, *args):
      found = run(worker, *args)
      if int(found[1]) != 11 or died:
        return found
      died.append(worker)
      return [types.SimpleNamespace(numpy=lambda: self._lose(worker))]

    engine._run = run_once
    step, found = engine_lib.Step(run=None), []
    for _ in range(4):
      updates = engine.run_round(step, source)
      found.append([int(update.outputs[1]) for update in updates])
    self.assertEqual(died, [1])
    self.assertEqual(found, [[0, 10, 20], [1, 11, 21], [2, 12], [3]])

  def test_late_worker_continues_at_the_current_round(self):
    """Checks that others evaluate its data until it is back."""
    seen, has_begun, is_applied = [], threading.Event(), threading.Event()

    def compute(worker, number):
      seen.append(number)
      if number == 20:
        has_begun.set()
        self.is_late.wait(_DEADLINE_SECONDS)
      elif number == 3:
        is_applied.wait(_DEADLINE_SECONDS)  # So that the other shares count.
      else:
        has_begun.wait(_DEADLINE_SECONDS)

    engine, source = self._reading_engine(compute, (5, 5, 5), backup_workers=1)
    for _ in range(3):
      engine.begin(_STEP, source)
    self.assertEqual(engine.applied, [[0, 10], [1, 11], [2, 12]])
    step, tested = engine_lib.Step(run=None), splits.Source(source.dataset)
    workers = []
    for number in range(4):
      if number == 2:
        self.assertFalse(self.is_late.is_set())
        self.is_late.set()
        # Waits until no worker is running.
        processes.wait_until(lambda: not self.pool._running)
      found = [each.outputs for each in engine.run_round(step, tested)]
      want = [number, 10 + number, 20 + number]
      self.assertEqual([int(read) for _, read in found], want)
      workers.append([int(worker) for worker, _ in found])
    self.assertNotIn(2, workers[0] + workers[1])
    self.assertEqual(workers[3][2], 2)
    self.assertEqual(tested.position, (4, 4, 4))
    engine.begin(_STEP, source)
    is_applied.set()
    engine.begin(_STEP, source)
    self.pool.wait()
    self.assertLen(engine.applied, 5)
    self.assertEqual(engine.applied[3], [13, 23])
    # All numbers of a step have the same index, and come from different workers.
    for number, step in enumerate(engine.applied):
      self.assertLen(set(step), 2)
      self.assertEqual({n % 10 for n in step}, {number})
    self.assertEqual(engine.report()['dropped'], 5)
    self.assertNotIn(21, seen)


class _Part(worker_pool.Task):
  """A step on data that is divided among the workers.

  Args:
    left: number of remaining steps of each worker. A step decreases it.
    done: list to which a step appends its worker when it begins.
    engine: the engine that counts the steps.
  """

  step = engine_lib.Step(run=None)
  outputs = None

  def __init__(self, left, done, engine):
    self.chosen = [self]
    self._left = left
    self._done = done
    self._engine = engine

  def has_work_for(self, worker):
    return self._left[worker] > 0

  def is_wanted(self):
    return True

  def may_begin(self, worker):
    return self._engine.may_begin(worker)

  def __setattr__(self, name, value):
    super().__setattr__(name, value)
    if name == 'worker':  # A worker takes the step, under the pool's lock.
      self._left[value] -= 1
      self._done.append(value)

  def run(self, worker):
    # Long enough for another worker to begin a step, if allowed.
    threading.Event().wait(0.01 if worker else 0.001)
    with self._engine.pool.lock:
      self._engine.finished(self)


class BoundedEngineTest(parameterized.TestCase):
  def _engine(self, num_workers, max_staleness):
    self.pool, _ = fakes.pool(self, num_workers)
    return _make(
      engine_lib.Engine, self.pool, 'bounded', max_staleness=max_staleness
    )

  def _run(self, engine, parts):
    """Returns the worker of each step, in order. Worker i has parts[i] steps."""
    left, done = list(parts), []
    for _ in range(sum(parts)):
      self.pool.submit(_Part(left, done, engine))
    self.pool.wait()
    return done

  def assert_bound(self, done, parts, bound):
    counts = [0] * len(parts)
    for worker in done:
      # Workers that have finished their part are not waited for.
      others = [c for c, part in zip(counts, parts, strict=True) if c < part]
      # The running step of the slowest worker has begun, so it counts too.
      self.assertLessEqual(counts[worker] - min(others), bound + 1, done)
      counts[worker] += 1
    self.assertEqual(counts, list(parts))

  @parameterized.product(
    parts=[(3, 12), (12, 3), (0, 5), (4, 4), (1, 7, 4)], max_staleness=[0, 1, 3]
  )
  def test_staleness_is_bounded_with_parts_of_different_size(
    self, parts, max_staleness
  ):
    engine = self._engine(len(parts), max_staleness)
    done = self._run(engine, parts)
    self.assert_bound(done, parts, max_staleness)

  @pytest.mark.smoke
  def test_idle_worker_rejoins_at_the_count_of_the_slowest(self):
    engine = self._engine(2, 1)
    self._run(engine, (2, 30))
    # The first worker need not catch up 28 steps.
    done = self._run(engine, (8, 8))
    self.assert_bound(done, (8, 8), 1)


class EngineTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    pool, _ = fakes.pool(self, 1)
    self.engine = _make(engine_lib.Engine, pool)
    self.began_at = {}

  def _start(self, worker):
    self.began_at[worker] = self.engine.steps_done

  def _end(self, worker, steps=1, step=_STEP):
    task = types.SimpleNamespace(worker=worker, began_at=self.began_at[worker])
    update = types.SimpleNamespace(
      step=step, chosen=[task] * steps, dropped=0, outputs=None
    )
    self.engine.finished(update)

  def test_slots_are_reused_only_after_they_were_applied(self):
    layout = types.SimpleNamespace(key='a layout', specs={})
    update = types.SimpleNamespace(
      function=types.SimpleNamespace(layout=layout),
      step=_STEP,
      specs=traced_step.Outputs(()),
    )
    task = types.SimpleNamespace(
      update=update,
      data=types.SimpleNamespace(index=0),
      slots=self.engine.take_slots(layout),
      attempt=self.engine.pool.attempt,
      reported=[],
    )
    update.chosen = [task]
    meanwhile = []

    def apply(slots):
      self.assertEqual(slots, [task.slots])
      meanwhile.append(self.engine.take_slots(layout))
      return []

    self.engine.apply_function = lambda update, count: apply
    self.engine.apply(update)
    self.assertNotEqual(meanwhile, [task.slots])
    self.assertIs(self.engine.take_slots(layout), task.slots)

  @pytest.mark.smoke
  def test_staleness_of_workers_in_turn_is_the_number_of_others(self):
    for worker in range(3):
      self._start(worker)
    for _ in range(4):
      for worker in range(3):
        self._end(worker)
        self._start(worker)
    # The first three began together, so 0, 1 and 2 steps were applied before theirs.
    self.assertEqual(self.engine.report()['staleness'], {0: 1, 1: 1, 2: 10})

  def test_staleness_of_a_slow_worker_is_the_number_of_steps_of_others(self):
    self._start('slow')
    for _ in range(7):
      self._start('fast')
      self._end('fast')
    self._end('slow')
    # A task without data does not count as a step.
    self._start('fast')
    self._end('fast', steps=0)
    report = self.engine.report()
    self.assertEqual(report['staleness'], {0: 7, 7: 1})
    self.assertEqual(report['steps'], 8)

  def test_results_are_read_when_they_are_used(self):
    step = engine_lib.Step(run=None, trains=True, results=list)
    number = engine_lib.LatestNumber(self.engine, step, 0, ())
    values = iter(range(9))
    self.engine._read_results = lambda step: [next(values)]
    is_busy = self.enter_context(mock.patch.object(self.engine.pool, 'is_busy'))

    def end(busy, expected):
      is_busy.return_value = busy
      self._start(0)
      self._end(0, step=step)
      for _ in range(2):
        self.assertEqual(int(number), expected)

    end(busy=True, expected=0)
    end(busy=True, expected=0)  # Still recent.
    end(busy=False, expected=1)
    self.engine.note_write()
    end(busy=True, expected=2)
    with mock.patch.object(engine_lib, '_RESULTS_SECONDS', 0.0):
      end(busy=True, expected=3)

  def test_results_that_a_recovery_has_reset_are_not_used(self):
    step = engine_lib.Step(run=None, trains=True, results=list)
    number = engine_lib.LatestNumber(self.engine, step, 0, ())
    self.enter_context(
      mock.patch.object(self.engine.pool, 'is_busy', return_value=False)
    )
    for value in (5, 0):
      self._start(0)
      self._end(0, step=step)
      self.engine._read_results = lambda step, value=value: [value]
      if not value:
        self.engine._with_recovery = self._recovered
      self.assertEqual(int(number), 5)

  def test_results_are_read_again_after_a_broken_connection(self):
    broken = tf.errors.UnavailableError(None, None, 'broken')
    read = mock.Mock(side_effect=[broken, [tf.constant(3)]])
    self.enter_context(
      mock.patch.object(engine_lib.slots, 'results_function', return_value=read)
    )
    self.assertEqual(self.engine._read_results(_STEP), [3])

  def _recovered(self, action):
    self.engine.forget()
    return action()


class _Dataset(input.WorkerDataset):
  """Five batches in two splits. The handle of a split is its number."""

  def __init__(self, by_rounds=False):
    data = tf.data.Dataset.range(5).batch(1)
    super().__init__(
      lambda c: data.shard(2, c.input_pipeline_id),
      2,
      list,
      by_rounds=by_rounds,
    )

  def open(self, index, start, worker):
    return tf.constant(index)


class SourceTest(tf.test.TestCase):
  def test_iterator_is_deleted_at_its_end(self):
    source, lives = splits.Source(_Dataset()), collections.Counter()
    split, handles = source.splits[0], []

    def end(handle):
      handles.append(weakref.ref(handle))
      raise tf.errors.OutOfRangeError(None, None, 'End of sequence')

    self.assertFalse(source.read(split, 0, lives, end))
    gc.collect()
    self.assertIsNone(handles[0]())

  def test_epoch_that_ends_within_the_data_keeps_its_position(self):
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

  def test_resumed_rounds_have_the_remaining_steps(self):
    source = splits.Source(_Dataset(True), Position(1, 1, (2, 2)))
    # One of the two done steps belongs to an earlier epoch.
    begun = [source.may_begin_step() for _ in range(3)]
    self.assertEqual(begun, [True, True, False])


class ReadTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.pool, _ = fakes.pool(self, 2)
    self.source = splits.Source(_Dataset())

  def has_work_for(self, worker):
    return splits.Read(self.pool, self.source).has_work_for(worker)

  def read(self, worker, compute=lambda handle: None):
    return splits.Read(self.pool, self.source).read(worker, compute)

  def done(self):
    return [split.done for split in self.source.splits]

  def test_returned_worker_waits_until_its_split_is_not_read(self):
    self.assertTrue(self.read(0))
    self.assertEqual(self.done(), [1, 0])
    self.pool.lost.add(1)
    self.assertFalse(self.has_work_for(1))

    def compute(handle):
      self.assertEqual(int(handle), 1)
      self.pool.lost.clear()
      self.assertFalse(self.has_work_for(1))
      self.assertTrue(self.has_work_for(0))

    self.assertTrue(self.read(0, compute))
    self.assertEqual(self.done(), [1, 1])
    self.assertTrue(self.has_work_for(1))

  def test_failed_element_is_read_again(self):
    def fail(handle):
      raise tf.errors.UnavailableError(None, None, 'the worker is gone')

    with self.assertRaises(tf.errors.UnavailableError):
      self.read(1, fail)
    self.assertEqual(self.done(), [0, 0])
    self.pool.lost.add(1)
    self.pool.lives[1] += 1
    handles = []
    for _ in range(2):
      self.assertTrue(self.read(0, lambda h: handles.append(int(h))))
    self.assertCountEqual(handles, [0, 1])

  def test_data_ends_when_all_splits_end(self):
    def end(handle):
      raise tf.errors.OutOfRangeError(None, None, 'End of sequence')

    with self.assertRaises(worker_pool.NotHereError):
      self.read(0, end)
    self.assertFalse(self.has_work_for(0))
    self.assertFalse(self.read(1, end))
    self.assertTrue(self.has_work_for(0))
    self.assertFalse(self.read(0))


if __name__ == '__main__':
  absltest.main()
