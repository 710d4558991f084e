"""SIGTERM in one process: the run saves after the step and resumes exactly."""

import dataclasses
import os
import signal
import threading
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, tiers, virtual_devices
from tests.fault_tolerance import preemption_program as program
from tf_strategies.checkpoint import checkpointer
from tf_strategies.cluster import exit_codes
from tf_strategies.fault_tolerance import preemption

virtual_devices.configure()


class _Program:
  """Runs of one program. A signal may preempt them."""

  def __init__(self, options):
    self.options = options
    devices = [f'CPU:{i}' for i in range(options.devices)]
    self._strategy = tfs.create_strategy(options.strategy, devices=devices)
    self.steps = []

  def train(self, signal_after=None, repeats=1):
    """Trains. Raises a signal after step `signal_after`."""

    def after_step(step):
      self.steps.append(step)
      if step == signal_after:
        for _ in range(repeats):
          signal.raise_signal(signal.SIGTERM)

    return program.train(self.options, self._strategy, after_step)


class PreemptionTest(tf_case.TestCase):
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

  @tiers.named_parameters(
    ('fit', {'loop': 'fit'}, (33,)),
    tiers.soak('central_storage', {'strategy': 'central_storage'}, (25,)),
    tiers.soak('end_of_epoch', {'evaluates': True}, (20, 59)),
    # After the first batch of the first evaluation.
    tiers.soak('in_an_evaluation', {'evaluates': True}, (20.5,)),
    tiers.soak('loop', {'loop': 'custom', 'devices': 3}, (1, 40)),
    tiers.soak('accumulating', {'accumulation': 3}, (25,)),
    tiers.soak('groups', {'steps_per_execution': 4}, (24,)),
  )
  def test_preempted_run_resumes_exactly(self, options, preempted_after):
    options = self._options(**options)
    other = self.create_tempdir().full_path
    straight = _Program(dataclasses.replace(options, directory=other))
    expected, all_results = straight.train()
    run = _Program(options)
    for step in preempted_after:
      self._preempt(run, signal_after=step)
      self.assertEqual(run.steps[-1], step)
    found, results = run.train()
    self.assert_same_state(expected, found)
    # No step was done twice or skipped.
    steps, all_steps = (
      # Evaluation steps are not counted.
      [step for step in each.steps if step == int(step)]
      for each in (run, straight)
    )
    self.assertEqual(steps, all_steps)
    # An interrupted epoch ends with the metrics of the whole epoch.
    for epoch, values in results.items():
      self.assertEqual(values, all_results[epoch], epoch)
    if options.loop == 'fit':
      self.assertIn('2', results)

  def test_signals_during_save_do_not_interrupt_it(self):
    options = self._options()
    run = _Program(options)
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

  def test_failed_save_is_reported_and_keeps_the_previous_checkpoint(self):
    run = _Program(self._options(loop='custom'))
    self._preempt(run, signal_after=30)
    with (
      mock.patch.object(os, 'rename', side_effect=OSError('disk full')),
      self.assertLogs(level='WARNING') as logs,
    ):
      self._preempt(run, signal_after=35)
    self.assertIn('disk full', ''.join(logs.output))
    self.assertIn('NOT saved', logs.output[-1])
    # The previous checkpoint still exists.
    run.steps.clear()
    run.train()
    self.assertEqual(run.steps[0], 31)


class SignalsTest(tf_case.TestCase):
  """Signal handlers of a run with a model of one layer."""

  def setUp(self):
    super().setUp()
    # A `fit` that raised in another test may still handle signals.
    self.enter_context(
      mock.patch.object(preemption.Preemption, '_in_fit', None)
    )
    self.received = []
    before = signal.signal(signal.SIGTERM, lambda n, _: self.received.append(n))
    self.addCleanup(signal.signal, signal.SIGTERM, before)
    self.before = signal.getsignal(signal.SIGTERM)
    keras.utils.set_random_seed(1)
    self.model = keras.Sequential(
      [keras.Input([3]), keras.layers.Dense(1, name='only')], name='small'
    )
    self.model.compile('sgd', 'mse')
    self.run_ = self._new_run()
    self.run_.restore()

  def _new_run(self, **options):
    return tfs.Run(self.directory, self.model, **options)

  def _fit(self, *callbacks, steps_per_epoch=2, **options):
    self.model.fit(
      tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.ones([4, 1]))).repeat(),
      callbacks=list(callbacks),
      verbose=0,
      steps_per_epoch=steps_per_epoch,
      **options,
    )

  def _fit_that_raises(self):
    def fail(batch, logs):
      raise ZeroDivisionError

    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with self.assertRaises(ZeroDivisionError):
      self._fit(self.run_, failing)

  def assert_handler_is_restored(self):
    self.assertIs(signal.getsignal(signal.SIGTERM), self.before)

  def test_handler_is_restored(self):
    with self.run_:
      self.assertIsNot(signal.getsignal(signal.SIGTERM), self.before)
      self.run_.exit_if_preempted(0, 1)
      outer = signal.getsignal(signal.SIGTERM)
      # Nested use.
      self._fit(self.run_)
      self.assertEqual(signal.getsignal(signal.SIGTERM), outer)
      another = self._new_run()
      another.restore()
      with another:
        pass
      self.assertEqual(signal.getsignal(signal.SIGTERM), outer)
    self.assert_handler_is_restored()
    with self.assertRaises(ZeroDivisionError), self.run_:
      _ = 1 / 0
    self.assert_handler_is_restored()
    self.assertEmpty(self.received)

  def test_unhandled_signal_is_raised_again_on_exit(self):
    with self.run_:
      signal.raise_signal(signal.SIGTERM)
      self.assertEmpty(self.received)
    self.assertEqual(self.received, [signal.SIGTERM])

  def test_other_thread_trains_without_signals(self):
    def train():
      with self.run_:
        self.run_.exit_if_preempted(0, 1)

    with self.assertLogs(level='WARNING') as logs:
      thread = threading.Thread(target=train, name='another')
      thread.start()
      thread.join(10)
    self.assertIn("trains in thread 'another'", logs.output[0])
    self.assert_handler_is_restored()

  def test_run_without_restore_is_refused(self):
    run = self._new_run()
    for begin in (run.__enter__, lambda: self._fit(run)):
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, r'run\.restore\(\) first, got fit'
      ):
        begin()
    self.assert_handler_is_restored()

  @parameterized.parameters(
    ({'initial_epoch': 0, 'steps_per_epoch': 9}, 1, 'initial_epoch=0 after'),
    (
      {'initial_epoch': 2, 'steps_per_epoch': 3},
      1,
      'steps_per_epoch=3 after 3',
    ),
    (
      {'initial_epoch': 2, 'steps_per_epoch': 8},
      2,
      'steps_per_execution=2 after 3 steps',
    ),
  )
  def test_fit_from_another_position_is_refused(self, options, group, message):
    self.run_.save(epoch=2, step=3)
    self.run_.restore()
    self.model.steps_per_execution = group
    for _ in range(2):  # The second call raises too.
      with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
        self._fit(self.run_, epochs=4, **options)
      self.assert_handler_is_restored()

  @parameterized.parameters('model', 'second_optimizer', 'optimizer_of_the_run')
  def test_fit_of_another_model_or_optimizer_is_refused(self, case):
    if case == 'optimizer_of_the_run':
      # The model trains with the optimizer that it was compiled with.
      self.run_ = self._new_run(optimizer=keras.optimizers.SGD())
    self.run_.restore()
    if case == 'model':
      self.model = keras.models.clone_model(self.model)
      self.model.compile('sgd', 'mse')
    if case == 'second_optimizer':
      # Like a `train_step` with two optimizers. The run does not save this one.
      self.model.second = keras.optimizers.SGD()
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'another model or optimizer'
    ):
      self._fit(self.run_)
    self.assert_handler_is_restored()

  def test_callbacks_see_one_begin_of_a_resumed_epoch(self):
    halve = keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)
    expected = self.model.optimizer.learning_rate.numpy() / 2**3

    def preempt(batch, logs):
      if halve.model.optimizer.iterations == 3:
        signal.raise_signal(signal.SIGTERM)

    preempting = keras.callbacks.LambdaCallback(on_train_batch_end=preempt)
    with self.assertRaises(SystemExit):
      self._fit(halve, preempting, self.run_, epochs=3)
    resumed = self._new_run()
    self.assertEqual(tuple(resumed.restore()), (1, 1))
    self._fit(halve, resumed, initial_epoch=1, epochs=3)
    self.assertEqual(self.model.optimizer.learning_rate.numpy(), expected)

  def test_handler_is_restored_after_a_failed_fit(self):
    another = self._new_run()
    another.restore()
    for again in (self.run_, another):
      self._fit_that_raises()
      self._fit(again)
      self.assert_handler_is_restored()
    self._fit_that_raises()
    with self.run_:
      outer = signal.getsignal(signal.SIGTERM)
      self._fit(self.run_)
      self.assertEqual(signal.getsignal(signal.SIGTERM), outer)
    self.assert_handler_is_restored()
    self.assertEmpty(self.received)

  def test_signal_after_a_failed_fit_reaches_the_next_run(self):
    self._fit_that_raises()
    signal.raise_signal(signal.SIGTERM)
    with self.assertRaises(SystemExit), self.run_:
      self.run_.exit_if_preempted(0, 1)
    self.assertEmpty(self.received)


if __name__ == '__main__':
  tf.test.main()
