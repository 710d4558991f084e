"""SIGTERM in one process: saved after the step, and exact from there."""

import dataclasses
import os
import signal
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tests.fault_tolerance import preemption_program as program
from tf_strategies.checkpoint import checkpointer
from tf_strategies.checkpoint.position import Position
from tf_strategies.cluster import exit_codes

virtual_devices.configure()

_TWO = ('CPU:0', 'CPU:1')


class _Run:
  """Runs of one program, of which some are preempted."""

  def __init__(self, options):
    self.options = options
    devices = [f'CPU:{i}' for i in range(options.devices)]
    self._strategy = tfs.create_strategy(options.strategy, devices=devices)
    self.steps = []

  def train(self, signal_after=None, repeats=1):
    """Trains; a signal comes during the step with that number."""

    def after_step(step):
      self.steps.append(step)
      if step == signal_after:
        for _ in range(repeats):
          signal.raise_signal(signal.SIGTERM)

    return program.train(self.options, self._strategy, after_step)


class PreemptionTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(
      signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM)
    )

  def _options(
    self, loop='fit', strategy='ring_mirrored', devices=2, **options
  ):
    directory = self.create_tempdir().full_path
    return program.Options(loop, strategy, devices, directory, **options)

  def _preempt(self, run, **arguments):
    with self.assertRaises(SystemExit) as caught:
      run.train(**arguments)
    self.assertEqual(caught.exception.code, exit_codes.RESTARTABLE_EXIT_CODE)

  def assert_same_state(self, expected, found):
    self.assertEqual(list(expected), list(found))
    for name, value in expected.items():
      np.testing.assert_array_equal(value, found[name], name)

  @parameterized.named_parameters(
    # In the first epoch, and in a later one.
    ('fit', {'loop': 'fit'}, (7, 33)),
  )
  def test_resumes_exactly(self, options, preempted_after):
    self.assert_resumes(options, preempted_after)

  @parameterized.named_parameters(
    ('central_storage', {'strategy': 'central_storage'}, (25,)),
    ('end_of_epoch', {'evaluates': True}, (20, 59)),
    ('loop', {'loop': 'custom', 'devices': 3}, (1, 40)),
    ('four_devices', {'loop': 'custom', 'devices': 4}, (25,)),
    ('accumulating', {'accumulation': 3}, (25,)),
    ('groups', {'steps_per_execution': 4}, (24,)),
    ('one_device', {'strategy': 'one_device', 'devices': 1}, (25,)),
  )
  @pytest.mark.soak
  def test_resumes_exactly_with(self, options, preempted_after):
    self.assert_resumes(options, preempted_after)

  def assert_resumes(self, options, preempted_after):
    options = self._options(**options)
    straight = _Run(dataclasses.replace(options, directory=self._new()))
    expected, all_results = straight.train()
    run = _Run(options)
    for step in preempted_after:
      self._preempt(run, signal_after=step)
      self.assertEqual(run.steps[-1], step)
    found, results = run.train()
    self.assert_same_state(expected, found)
    # No step was done twice, and none was left out.
    self.assertEqual(_training(run.steps), _training(straight.steps))
    # What was interrupted has the metrics of the whole epoch.
    for epoch, values in results.items():
      self.assertEqual(values, all_results[epoch], epoch)
    if options.loop == 'fit':
      self.assertIn('2', results)

  def _new(self):
    return self.create_tempdir().full_path

  @pytest.mark.smoke
  def test_steps_before_the_signal_matter(self):
    # The comparison above is not one of things that never change.
    options = self._options(loop='custom')
    run = _Run(options)
    expected, _ = run.train()
    other = _Run(dataclasses.replace(options, directory=self._new()))
    self._preempt(other, signal_after=30)
    # It goes on at the right place, with weights from the start.
    with mock.patch.object(tfs.RunCheckpoint, 'restore', _restore_another):
      found, _ = other.train()
    differences = [
      np.abs(value - found[name]).max() for name, value in expected.items()
    ]
    self.assertGreater(max(differences), 1e-3)

  @pytest.mark.soak
  def test_during_an_evaluation(self):
    options = self._options(evaluates=True)
    expected, results = _Run(
      dataclasses.replace(options, directory=self._new())
    ).train()
    run = _Run(options)
    self._preempt(run, signal_after=20.5)
    # It stopped after the first batch of the evaluation.
    self.assertEqual(run.steps.count(20.5), 1)
    found, found_results = run.train()
    self.assert_same_state(expected, found)
    self.assertEqual(found_results, {k: results[k] for k in ('1', '2')})

  def test_second_signal_while_it_saves(self):
    options = self._options()
    run = _Run(options)
    write = checkpointer._write_arrays

    def interrupted(*args):
      signal.raise_signal(signal.SIGTERM)
      result = write(*args)
      signal.raise_signal(signal.SIGTERM)
      return result

    with mock.patch.object(checkpointer, '_write_arrays', interrupted):
      self._preempt(run, signal_after=13, repeats=2)
    store = checkpointer.Checkpointer(
      os.path.join(options.directory, 'checkpoints')
    )
    with self.assertNoLogs(level='WARNING'):
      found = store.newest()
    self.assertEqual((found.metadata['epoch'], found.metadata['step']), (0, 13))

  def test_checkpoint_that_cannot_be_written(self):
    options = self._options(loop='custom')
    run = _Run(options)
    self._preempt(run, signal_after=30)
    with (
      mock.patch.object(os, 'rename', side_effect=OSError('disk full')),
      self.assertLogs(level='WARNING') as logs,
    ):
      self._preempt(run, signal_after=35)
    self.assertIn('disk full', ''.join(logs.output))
    self.assertIn('NOT saved', logs.output[-1])
    # The one before is there.
    run.steps.clear()
    run.train()
    self.assertEqual(run.steps[0], 31)


def _training(steps):
  """Without those of evaluations."""
  return [step for step in steps if step == int(step)]


def _restore_another(checkpoint):
  del checkpoint
  return Position(1, 10)


class _Small:
  """A model of one layer, and its checkpoint."""

  def __init__(self, directory):
    keras.utils.set_random_seed(1)
    self.model = keras.Sequential(
      [keras.Input([3]), keras.layers.Dense(1, name='only')], name='small'
    )
    self.model.compile('sgd', 'mse')
    self.checkpoint = tfs.RunCheckpoint(directory, self.model)

  def fit(self, callback, **options):
    self.model.fit(
      tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.ones([4, 1]))).repeat(),
      callbacks=callback,
      verbose=0,
      **options,
    )


class SignalsTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.heard = []
    before = signal.signal(signal.SIGTERM, lambda n, _: self.heard.append(n))
    self.addCleanup(signal.signal, signal.SIGTERM, before)
    self.small = _Small(self.create_tempdir().full_path)

  def test_handler_is_put_back(self):
    before = signal.getsignal(signal.SIGTERM)
    with tfs.Preemption(self.small.checkpoint) as preemption:
      self.assertIsNot(signal.getsignal(signal.SIGTERM), before)
      self.assertFalse(preemption.requested)
    self.assertIs(signal.getsignal(signal.SIGTERM), before)
    with (
      self.assertRaises(ZeroDivisionError),
      tfs.Preemption(self.small.checkpoint),
    ):
      _ = 1 / 0
    self.assertIs(signal.getsignal(signal.SIGTERM), before)
    self.assertEmpty(self.heard)

  def test_signal_that_nobody_looked_at_is_raised_again(self):
    with tfs.Preemption(self.small.checkpoint):
      signal.raise_signal(signal.SIGTERM)
      self.assertEmpty(self.heard)
    self.assertEqual(self.heard, [signal.SIGTERM])

  def test_signal_that_was_seen_is_not_raised_again(self):
    with tfs.Preemption(self.small.checkpoint) as preemption:
      signal.raise_signal(signal.SIGTERM)
      self.assertTrue(preemption.requested)
    self.assertEmpty(self.heard)

  def test_other_thread_is_refused(self):
    found = []

    def enter():
      try:
        with tfs.Preemption(self.small.checkpoint):
          found.append(None)
      except tfs.errors.UnsupportedOptionError as e:
        found.append(str(e))

    thread = threading.Thread(target=enter, name='another')
    thread.start()
    thread.join(10)
    self.assertIn("Preemption in thread 'another'", found[0])

  @parameterized.parameters(-1, float('nan'))
  def test_bad_seconds(self, seconds):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'check_seconds='
    ):
      tfs.Preemption(self.small.checkpoint, check_seconds=seconds)

  def test_servers_that_do_not_know_what_to_save(self):
    strategy = mock.Mock(spec=tf.distribute.Strategy)
    strategy.extended.communicator = None
    strategy.recovery = mock.Mock(is_open=False)
    with tfs.Preemption(strategy) as preemption:
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'strategy.restore'
      ):
        _ = preemption.requested
      strategy.recovery.is_open = True
      self.assertFalse(preemption.requested)

  def test_strategy_that_saves_nothing(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'RingMirroredStrategy as checkpoint'
    ):
      tfs.PreemptionCheckpoint(tfs.RingMirroredStrategy(_TWO))

  def test_fit_that_was_not_restored(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'before checkpoint.restore'
    ):
      self.small.fit(
        tfs.PreemptionCheckpoint(self.small.checkpoint), steps_per_epoch=2
      )

  @parameterized.parameters(
    ({'initial_epoch': 0, 'steps_per_epoch': 9}, 'initial_epoch=0 after'),
    ({'initial_epoch': 2, 'steps_per_epoch': 3}, 'steps_per_epoch=3 after 3'),
  )
  def test_fit_that_begins_elsewhere(self, options, message):
    self.small.checkpoint.save(epoch=2, step=3)
    self.small.checkpoint.restore()
    callback = tfs.PreemptionCheckpoint(self.small.checkpoint)
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):  # What is wrong once is wrong twice.
      with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
        self.small.fit(callback, epochs=4, **options)
      self.assertIs(signal.getsignal(signal.SIGTERM), before)

  def test_groups_of_steps_that_do_not_end_where_it_was_saved(self):
    self.small.checkpoint.save(epoch=2, step=3)
    self.small.checkpoint.restore()
    self.small.model.steps_per_execution = 2
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'steps_per_execution=2 after 3 steps'
    ):
      self.small.fit(
        tfs.PreemptionCheckpoint(self.small.checkpoint),
        initial_epoch=2,
        epochs=4,
        steps_per_epoch=8,
      )

  def test_fit_that_raised_leaves_the_handler(self):
    before = signal.getsignal(signal.SIGTERM)
    self.small.checkpoint.restore()
    callback = tfs.PreemptionCheckpoint(self.small.checkpoint)
    for again in (callback, tfs.PreemptionCheckpoint(self.small.checkpoint)):
      with self.assertRaises(ZeroDivisionError):
        self._fit_that_raises(callback)
      self.small.fit(again, steps_per_epoch=2)
      self.assertIs(signal.getsignal(signal.SIGTERM), before)
    with self.assertRaises(ZeroDivisionError):
      self._fit_that_raises(callback)
    with tfs.Preemption(self.small.checkpoint):
      pass
    self.assertIs(signal.getsignal(signal.SIGTERM), before)
    self.assertEmpty(self.heard)

  def _fit_that_raises(self, callback):
    def fail(batch, logs):
      raise ZeroDivisionError

    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    self.small.fit([callback, failing], steps_per_epoch=2)

  def test_signal_after_a_fit_that_raised_is_handed_on(self):
    self.small.checkpoint.restore()
    with self.assertRaises(ZeroDivisionError):
      self._fit_that_raises(tfs.PreemptionCheckpoint(self.small.checkpoint))
    signal.raise_signal(signal.SIGTERM)
    with tfs.Preemption(self.small.checkpoint) as preemption:
      self.assertTrue(preemption.requested)
    self.assertEmpty(self.heard)

  def test_one_within_the_other(self):
    before = signal.getsignal(signal.SIGTERM)
    with tfs.Preemption(self.small.checkpoint):
      outer = signal.getsignal(signal.SIGTERM)
      with tfs.Preemption(self.small.checkpoint):
        pass
      self.assertEqual(signal.getsignal(signal.SIGTERM), outer)
      self.small.checkpoint.restore()
      callback = tfs.PreemptionCheckpoint(self.small.checkpoint)
      self.small.fit(callback, steps_per_epoch=2)
      self.assertEqual(signal.getsignal(signal.SIGTERM), outer)
    self.assertIs(signal.getsignal(signal.SIGTERM), before)

  def test_each_epoch_is_saved(self):
    self.assertEqual(self.small.checkpoint.restore(), Position())
    callback = tfs.PreemptionCheckpoint(self.small.checkpoint)
    self.small.fit(callback, epochs=2, steps_per_epoch=2)
    self.assertEqual(self.small.checkpoint.restore(), Position(2))


if __name__ == '__main__':
  tf.test.main()
