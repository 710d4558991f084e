"""Preemption: on SIGTERM all workers save after the same step, and exit.

Whoever preempts a process sends SIGTERM and, half a minute later, SIGKILL. Here
the signal only sets a flag. After a step the workers tell each other whether
one of them has the flag, the chief saves, and all exit with
`RESTARTABLE_EXIT_CODE`, with which `python -m tf_strategies.launch
--max_restarts=3`, Kubernetes and others start them again.

SIGINT is left alone: who presses Ctrl-C does not want the run to start again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.cluster import exit_codes
from tf_strategies.fault_tolerance import run_checkpoint

# Steps between two questions, at most: a worker may be slow all of a sudden.
_MOST_STEPS = 1000


class Preemption:
  """A context in which SIGTERM asks for a checkpoint, for loops of one's own.

  Asking the others costs a small collective, so it is done every
  `check_seconds`, at a step that all workers agree on. A second signal changes
  nothing. If the block ends and nobody has asked for the flag since the signal
  came, the signal is raised again when the block is left.

  Example:

    >>> import signal, tempfile
    >>> import keras
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('adam', 'mse')
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   checkpoint = run_checkpoint.RunCheckpoint(directory, model)
    ...   epoch, step = checkpoint.restore()
    ...   try:
    ...     with Preemption(checkpoint) as preemption:
    ...       while True:
    ...         step += 1    # Train here.
    ...         if step == 3:
    ...           signal.raise_signal(signal.SIGTERM)
    ...         if preemption.requested:
    ...           preemption.save_and_exit(epoch, step)
    ...   except SystemExit as e:
    ...     print(e.code, *checkpoint.restore())
    143 0 3

  Args:
    checkpoint: a `RunCheckpoint`; or a `ParameterServerStrategy` with a
      `checkpoint_dir`, which saves by itself.
    signals: that ask for a checkpoint. Slurm can send another one earlier.
    check_seconds: how often workers ask each other, about; 0 for each step.

  Raises:
    UnsupportedOptionError: a strategy that saves nothing, or a thread other
      than the main thread, to which Python gives no signals.
  """

  # Of a `fit` that has not ended: nothing tells of one that raised.
  _in_fit: Preemption | None = None

  def __init__(
    self,
    checkpoint: run_checkpoint.RunCheckpoint | tf.distribute.Strategy,
    signals: Sequence[int] = (signal.SIGTERM,),
    check_seconds: float = 0.2,
  ):
    if not check_seconds >= 0:
      raise errors.UnsupportedOptionError(
        f'check_seconds={check_seconds!r}',
        'a number of seconds, 0 or more',
        'leave it out for 0.2',
      )
    self._server_checkpoint = None
    if isinstance(checkpoint, tf.distribute.Strategy):
      self._server_checkpoint = checkpoint = _ServerCheckpoint(checkpoint)
    self._checkpoint = checkpoint
    self._signals = tuple(signals)
    self._handlers: dict[int, Any] = {}
    self._signal: int | None = None
    self._signalled_at = 0.0
    self._was_seen = False
    extended = checkpoint.strategy.extended
    workers = getattr(extended, 'communicator', None)
    several = workers is not None and workers.world_size > 1
    self._question = _Question(workers, check_seconds) if several else None
    # Its batches take another time than training steps.
    self._evaluation = _Question(workers, check_seconds) if several else None

  def __enter__(self) -> Preemption:
    if threading.current_thread() is not threading.main_thread():
      raise errors.UnsupportedOptionError(
        f'Preemption in thread {threading.current_thread().name!r}',
        'the main thread: Python gives signals to no other',
        'enter it in the main thread, and train there',
      )
    # Else its handlers would be the ones to put back.
    abandoned, Preemption._in_fit = Preemption._in_fit, None
    unseen = None if abandoned is None else abandoned._put_back()
    self._signal, self._was_seen = None, False
    for number in self._signals:
      self._handlers[number] = signal.signal(number, self._on_signal)
    if unseen is not None:
      signal.raise_signal(unseen)
    return self

  def enter_for_fit(self) -> None:
    """Enters, where the end may be missed: the next one that enters ends it."""
    self.__enter__()
    Preemption._in_fit = self

  def __exit__(self, error_type, *unused):
    if Preemption._in_fit is self:
      Preemption._in_fit = None
    unseen = self._put_back()
    if error_type is None and unseen is not None:
      signal.raise_signal(unseen)

  def _put_back(self) -> int | None:
    """Puts handlers back; returns a signal that nobody has looked at."""
    handlers, self._handlers = self._handlers, {}
    for number, handler in handlers.items():
      # None: it was set by code that is not Python.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    return None if self._was_seen else self._signal

  def _on_signal(self, number, frame):
    # No logging: the signal may have interrupted a logging call.
    if self._signal is None:
      self._signal, self._signalled_at = number, time.monotonic()

  @property
  def requested(self) -> bool:
    """Whether to save and exit now; ask after each step, on all workers.

    All workers get the same answer after the same step.

    Raises:
      UnsupportedOptionError: a strategy with parameter servers that does not
        know what to save.
    """
    return self.is_requested()

  def is_requested(self, at_once: bool = False) -> bool:
    """As `requested`.

    Args:
      at_once: whether to ask the other workers though it is not time yet, as
        at the end of the training; the same on all of them.
    """
    return self._ask(self._question, at_once)

  def is_requested_in_evaluation(self) -> bool:
    """As `requested`, after each batch of an evaluation."""
    return self._ask(self._evaluation, False)

  def _ask(self, question: _Question | None, at_once: bool) -> bool:
    if self._server_checkpoint is not None:
      self._server_checkpoint.check_open()
    is_signalled = self._signal is not None
    if question is not None:
      is_signalled = question.ask(is_signalled, at_once)
    self._was_seen = self._was_seen or is_signalled
    return is_signalled

  def save_and_exit(self, epoch: int, step: int) -> NoReturn:
    """Saves, on the chief, waits for it, leaves the others and exits.

    Args:
      epoch: epochs that are done.
      step: steps of the next one that are done.

    Raises:
      SystemExit: with RESTARTABLE_EXIT_CODE, so that `with` and `finally` are
        gone through. Also if nothing could be saved, which is logged: the
        checkpoint before is there.
    """
    began = time.monotonic()
    try:
      self._checkpoint.save(epoch, step)
      is_saved = True
    except OSError:
      logging.exception('The checkpoint could not be saved.')
      is_saved = False
    if self._question is not None:
      is_saved = self._question.is_saved_everywhere(is_saved)
      # A worker that just ends would look as if it had died.
      self._checkpoint.strategy.close()
    now = time.monotonic()
    logging.warning(
      'Preempted at epoch %d, step %d: %s in %.2f s%s. Exiting with status %d.',
      epoch,
      step,
      'saved' if is_saved else 'NOT saved',
      now - began,
      ''
      if self._signal is None
      else f', {now - self._signalled_at:.2f} s after the signal',
      exit_codes.RESTARTABLE_EXIT_CODE,
    )
    raise SystemExit(exit_codes.RESTARTABLE_EXIT_CODE)


class _Question:
  """How workers find out that one of them was signalled, after the same step.

  Args:
    workers: the link to the others.
    check_seconds: how often to ask.
  """

  def __init__(self, workers, check_seconds: float):
    self._workers = workers
    self._check_seconds = check_seconds
    # From one question to the next, and those that are done of them.
    self._steps = 1
    self._steps_done = 0
    self._seconds_a_step = check_seconds
    self._asked_at = time.monotonic()
    self._answer = False

  def ask(self, is_signalled: bool, at_once: bool) -> bool:
    """Whether any worker is signalled, as far as all know."""
    if not at_once:  # Else there may have been no step.
      self._steps_done += 1
    if self._answer or (self._steps_done < self._steps and not at_once):
      return self._answer
    # The slowest says when to meet again: its steps may take longer from now.
    mine = np.array([is_signalled, -self._steps_wanted()], np.int64)
    everyone = self._workers.combine(tf.constant(mine), 'max', 'preemption')
    signalled, negative_steps = everyone.numpy().tolist()
    self._steps = -negative_steps
    self._answer = bool(signalled)
    return self._answer

  def _steps_wanted(self) -> int:
    now = time.monotonic()
    if self._steps_done:
      self._seconds_a_step = (now - self._asked_at) / self._steps_done
    self._asked_at, self._steps_done = now, 0
    steps = self._check_seconds / max(self._seconds_a_step, 1e-6)
    return int(min(max(steps, 1), _MOST_STEPS))

  def is_saved_everywhere(self, is_saved: bool) -> bool:
    """Waits for all workers; whether all could save."""
    flag = tf.constant(int(is_saved), tf.int64)
    return bool(self._workers.combine(flag, 'min', 'preemption/saved').numpy())


class _ServerCheckpoint:
  """The checkpoints that a `ParameterServerStrategy` writes by itself."""

  def __init__(self, strategy: tf.distribute.Strategy):
    recovery = getattr(strategy, 'recovery', None)
    if recovery is None or not recovery.is_enabled:
      raise errors.UnsupportedOptionError(
        f'{type(strategy).__name__} as checkpoint',
        'a RunCheckpoint, or a ParameterServerStrategy that has a '
        'checkpoint_dir',
        'pass tfs.RunCheckpoint(directory, model)',
      )
    self.strategy = strategy

  def check_open(self) -> None:
    """Checks, after the first step already, that something can be saved."""
    if not self.strategy.recovery.is_open:
      raise errors.UnsupportedOptionError(
        f'Preemption with a {type(self.strategy).__name__} that does not know '
        'what to save',
        'one that was told the model and the optimizer',
        'call strategy.restore(model=model, optimizer=optimizer) before the '
        'loop',
      )

  def save(self, epoch: int, step: int) -> None:
    """Saves at once, or not at all where a server has gone as well."""
    del epoch, step  # The strategy counts the steps that it begins.
    self.check_open()
    try:
      # Not guarded: there is no time to wait for a server to come back.
      self.strategy.recovery.save()
    except (errors.ParameterServerUnavailableError, tf.errors.OpError) as e:
      raise OSError(f'the variables cannot be read: {e}') from e


class PreemptionCheckpoint(keras.callbacks.Callback):
  """Saves after each epoch, and on SIGTERM after the step that runs; for `fit`.

  Make it the last one in the list: after a signal, callbacks behind it do not
  hear of the last step. Give `fit` the batches of whole epochs, from the
  restored one on. Those of steps that were done before are read and left out,
  though callbacks hear of them, and metrics go on with what they had. (Keras
  counts the batches of a data set: it would end early with fewer.) If the
  signal comes in or after the last step of an epoch, that epoch is not
  evaluated.

  With parameter servers the strategy saves and restores by itself: pass the
  strategy, next to `tfs.ResumeFit(strategy)`.

  After a `fit` that raised, SIGTERM waits for the next `fit` or `Preemption`,
  which hears of it.

  Example:

    checkpoint = tfs.RunCheckpoint('checkpoints', model, settings={'seed': 1})
    epoch, _ = checkpoint.restore()
    model.fit(
      tfs.data.make_dataset(
        train, options, training=True, epochs=3, start=(epoch, 0),
        steps_per_epoch=100),
      initial_epoch=epoch, epochs=3, steps_per_epoch=100,
      callbacks=[tfs.PreemptionCheckpoint(checkpoint)])

  Args:
    checkpoint: as in `Preemption`; `restore` was called.
    save_each_epoch: whether to save without a signal, too. A strategy with
      parameter servers does so by itself.
    signals: as in `Preemption`.
    check_seconds: as in `Preemption`.

  Raises:
    UnsupportedOptionError: as `Preemption`; or, when `fit` begins, a run that
      was not restored, does not begin where the checkpoint is, or has groups
      of steps (`steps_per_execution`) of which none ends there.
  """

  def __init__(
    self,
    checkpoint: run_checkpoint.RunCheckpoint | tf.distribute.Strategy,
    save_each_epoch: bool = True,
    signals: Sequence[int] = (signal.SIGTERM,),
    check_seconds: float = 0.2,
  ):
    super().__init__()
    # Of parameter servers, of which the strategy keeps the position.
    self._checkpoint = None
    if isinstance(checkpoint, run_checkpoint.RunCheckpoint):
      self._checkpoint = checkpoint
    self._saves_each_epoch = save_each_epoch and self._checkpoint is not None
    self._preemption = Preemption(checkpoint, signals, check_seconds)
    self._resumed_from: position_lib.Position | None = None
    self._is_first_epoch = False
    self._listens = False
    self._epoch = 0
    self._steps_done = 0
    self._steps_to_skip = 0

  def on_train_begin(self, logs=None):
    """Notes where the run goes on."""
    self._listens = False
    if self._checkpoint is not None:
      position = self._checkpoint.position
      if position is None:
        raise errors.UnsupportedOptionError(
          'PreemptionCheckpoint(checkpoint) before checkpoint.restore()',
          'a fit that begins where the newest checkpoint is',
          'write epoch, _ = checkpoint.restore() before fit',
        )
      if self._resumed_from is not position:
        self._resumed_from = position
        self._steps_to_skip = position.step
        self._is_first_epoch = True

  def on_epoch_begin(self, epoch, logs=None):
    """Listens for signals; an epoch that was interrupted goes on."""
    self._epoch = epoch
    if self._is_first_epoch:
      self._check_begin(epoch)
      self._is_first_epoch = False
    if not self._listens:
      self._listens = True
      self._preemption.enter_for_fit()
    if self._steps_to_skip:
      self._checkpoint.restore_metrics()
      self._skip_steps()

  def _check_begin(self, epoch):
    position, steps = self._resumed_from, self.params.get('steps')
    if epoch != position.epoch:
      raise errors.UnsupportedOptionError(
        f'initial_epoch={epoch} after {position} was restored',
        f'{position.epoch}',
        f'write initial_epoch={position.epoch}',
      )
    if steps is not None and steps <= position.step:
      raise errors.UnsupportedOptionError(
        f'steps_per_epoch={steps} after {position.step} steps of an epoch were '
        'restored',
        'the steps of a whole epoch',
        'pass to steps_per_epoch what the run began with',
      )
    group = self.model.steps_per_execution
    if position.step % group:
      raise errors.UnsupportedOptionError(
        f'steps_per_execution={group} after {position.step} steps of an epoch '
        'were restored',
        f'a divisor of {position.step}',
        'pass to compile the steps_per_execution that the run began with',
      )

  def _skip_steps(self):
    """Lets `fit` go through steps that were done before without doing them."""
    results = self.model.get_metrics_result()

    def skip(iterator):
      if self._steps_done < self._steps_to_skip:
        for _ in range(self.model.steps_per_execution):
          next(iterator)
        return results
      self._steps_to_skip = 0
      _keras_internal.swap_train_function(self.model, function)
      return function(iterator)

    # For those who look at steps: what is skipped is none.
    skip.skips = lambda batch: batch < self._steps_to_skip
    function = _keras_internal.swap_train_function(self.model, skip)

  def on_train_batch_begin(self, batch, logs=None):
    """Counts the steps before this one, or this group of them."""
    self._steps_done = batch

  def on_train_batch_end(self, batch, logs=None):
    """Saves and exits, if a worker was signalled."""
    done = self._steps_done + self.model.steps_per_execution
    if done <= self._steps_to_skip:
      return
    if self._preemption.requested:
      steps = self.params.get('steps')
      if steps is not None and done >= steps:
        self._preemption.save_and_exit(self._epoch + 1, 0)
      self._preemption.save_and_exit(self._epoch, done)

  def on_test_batch_end(self, batch, logs=None):
    """Does not wait for the end of an evaluation that `fit` does."""
    if self._preemption.is_requested_in_evaluation():
      self._preemption.save_and_exit(self._epoch + 1, 0)

  def on_epoch_end(self, epoch, logs=None):
    """Saves; exits, if a worker was signalled since the last step."""
    if self._preemption.is_requested(at_once=True):
      self._preemption.save_and_exit(epoch + 1, 0)
    if self._saves_each_epoch:
      self._checkpoint.save(epoch + 1)

  def on_train_end(self, logs=None):
    """Leaves signals alone; one that nobody has looked at is raised again."""
    self._preemption.__exit__(None, None, None)
