"""Preemption: on SIGTERM all workers save after the same step, and exit.

A scheduler sends SIGTERM and, half a minute later, SIGKILL. The signal sets a
flag. After a step the workers exchange their flags, the chief saves, and all exit
with `RESTARTABLE_EXIT_CODE`, on which launchers restart them. SIGINT is not
handled: Ctrl-C should end the run.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, errors, option_checks
from tf_strategies.cluster import exit_codes
from tf_strategies.cluster import workers as workers_lib
from tf_strategies.fault_tolerance import resume_fit, run_checkpoint

# Steps between two exchanges, at most: a worker may become slow suddenly.
_MOST_STEPS = 1000


@option_checks.has_options
class Preemption:
  """A context in which SIGTERM requests a checkpoint, for custom loops.

  Workers exchange flags in a small collective, every `check_seconds`, at a step
  that all agree on. A second signal has no effect. A signal that was not seen
  through `requested` is raised again when the block ends.

  Example:

    >>> import keras, tempfile
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('adam', 'mse')
    >>> checkpoint = run_checkpoint.RunCheckpoint(tempfile.mkdtemp(), model)
    >>> epoch, first = checkpoint.restore()
    >>> with Preemption(checkpoint) as preemption:
    ...   for step in range(first, 9):  # Train here; a signal comes.
    ...     signal.raise_signal(signal.SIGTERM)
    ...     if preemption.requested:
    ...       preemption.save_and_exit(epoch, step + 1)
    Traceback (most recent call last):
    SystemExit: 143
    >>> tuple(checkpoint.restore())
    (0, 1)

  Args:
    checkpoint: a `RunCheckpoint`; or a `ParameterServerStrategy` with a
      `checkpoint_dir`, which saves by itself.
    check_seconds: approximate time between two exchanges; 0 for each step.

  Raises:
    UnsupportedOptionError: a strategy that saves nothing, or not the main thread.
  """

  # Of a `fit` that has not ended: Keras does not report one that raised.
  _in_fit: Preemption | None = None

  def __init__(
    self,
    checkpoint: run_checkpoint.RunCheckpoint | tf.distribute.Strategy,
    check_seconds: float = 0.2,
  ):
    option_checks.check_seconds('check_seconds', check_seconds, or_zero=True)
    resume_fit.check_checkpoint(checkpoint)
    if isinstance(checkpoint, tf.distribute.Strategy):
      checkpoint = _ServerCheckpoint(checkpoint)
    self._checkpoint = checkpoint
    self._is_entered = False
    self._handler: Any = None
    self._signalled_at: float | None = None
    self._was_seen = False
    workers = workers_lib.link_of(checkpoint.strategy)
    is_alone = workers is None or workers.world_size == 1
    self._workers = None if is_alone else workers
    self._question = _Question(self._workers, check_seconds)
    # Its batches take a different time than training steps.
    self._evaluation = _Question(self._workers, check_seconds)

  def __enter__(self) -> Preemption:
    if threading.current_thread() is not threading.main_thread():
      raise errors.UnsupportedOptionError(
        f'Preemption in thread {threading.current_thread().name!r}',
        'the main thread, which receives signals in Python',
        'enter it in the main thread, and train there',
      )
    self._checkpoint.own()
    # Otherwise its handlers would be restored later.
    abandoned, Preemption._in_fit = Preemption._in_fit, None
    is_unseen = abandoned is not None and abandoned._put_back()
    self._signalled_at, self._was_seen = None, False
    self._handler = signal.signal(signal.SIGTERM, self._on_signal)
    self._is_entered = True
    if is_unseen:
      signal.raise_signal(signal.SIGTERM)
    return self

  def enter_for_fit(self) -> None:
    """Enters; if the exit is missed, the next one that enters does it."""
    self.__enter__()
    Preemption._in_fit = self

  def __exit__(self, error_type, *unused):
    if Preemption._in_fit is self:
      Preemption._in_fit = None
    is_unseen = self._put_back()
    if error_type is None and is_unseen:
      signal.raise_signal(signal.SIGTERM)

  def _put_back(self) -> bool:
    """Restores the handler; returns whether a signal was not seen."""
    if self._is_entered:
      self._is_entered = False
      # None: it was not set by Python code.
      signal.signal(signal.SIGTERM, self._handler or signal.SIG_DFL)
    return self._signalled_at is not None and not self._was_seen

  def _on_signal(self, number, frame):
    # No logging: the signal may have interrupted a logging call.
    if self._signalled_at is None:
      self._signalled_at = time.monotonic()

  @property
  def requested(self) -> bool:
    """Returns whether to save and exit now; check after each step, on all workers.

    All workers get the same answer after the same step.

    Raises:
      UnsupportedOptionError: parameter servers that do not know what to save.
    """
    return self.is_requested()

  def is_requested(
    self, at_once: bool = False, in_evaluation: bool = False
  ) -> bool:
    """As `requested`, after a step, or after a batch `in_evaluation`.

    With `at_once`, the same on all workers, they exchange flags regardless of the
    time, as at the end of training.
    """
    if isinstance(self._checkpoint, _ServerCheckpoint):
      self._checkpoint.check_open()
    question = self._evaluation if in_evaluation else self._question
    is_signalled = question.ask(self._signalled_at is not None, at_once)
    self._was_seen = self._was_seen or is_signalled
    return is_signalled

  def save_and_exit(self, epoch: int, step: int) -> NoReturn:
    """Saves, closes the strategy and exits, at that position on all workers.

    Raises:
      SystemExit: with RESTARTABLE_EXIT_CODE, so that `with` and `finally` run.
        Also if saving failed, which is logged: the previous checkpoint remains.
    """
    began = time.monotonic()
    try:
      self._checkpoint.save(epoch, step)
      is_saved = True
    except OSError:
      logging.exception('The checkpoint could not be saved.')
      is_saved = False
    if self._workers is not None:
      flag = tf.constant(int(is_saved), tf.int64)
      is_saved = self._workers.combine(flag, 'min', 'preemption/saved').numpy()
      # Without it, the others would take the exit for a failure.
      self._checkpoint.strategy.close()
    now = time.monotonic()
    after = ''
    if self._signalled_at is not None:
      after = f', {now - self._signalled_at:.2f} s after the signal'
    logging.warning(
      'Preempted at epoch %d, step %d: %s in %.2f s%s. Exiting with status %d.',
      *(epoch, step, 'saved' if is_saved else 'NOT saved', now - began, after),
      exit_codes.RESTARTABLE_EXIT_CODE,
    )
    raise SystemExit(exit_codes.RESTARTABLE_EXIT_CODE)


class _Question:
  """Exchanges between workers whether one of them was signalled."""

  def __init__(self, workers, check_seconds: float):
    self._workers = workers
    self._check_seconds = check_seconds
    self._steps = 1  # From one exchange to the next.
    self._steps_done = 0
    self._seconds_a_step = check_seconds
    self._asked_at = time.monotonic()
    self._answer = False

  def ask(self, is_signalled: bool, at_once: bool) -> bool:
    """Returns whether any worker is signalled; the same on all."""
    if self._workers is None:
      return is_signalled
    if not at_once:  # Otherwise there may have been no step.
      self._steps_done += 1
    if self._answer or (self._steps_done < self._steps and not at_once):
      return self._answer
    # The slowest decides on the next: its steps may take longer from now on.
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


class _ServerCheckpoint:
  """A `ParameterServerStrategy`, as Preemption sees a `RunCheckpoint`."""

  def __init__(self, strategy: tf.distribute.Strategy):
    if not (hasattr(strategy, 'recovery') and strategy.recovery.is_enabled):
      raise errors.UnsupportedOptionError(
        f'{type(strategy).__name__} as checkpoint',
        'a RunCheckpoint, or a ParameterServerStrategy that has a '
        'checkpoint_dir',
        'pass tfs.RunCheckpoint(directory, model)',
      )
    self.strategy = strategy

  def own(self) -> None:
    """Nothing: the strategy owns its directory since it was made."""

  def check_open(self) -> None:
    """Checks, from the first step on, that the strategy can save."""
    if not self.strategy.recovery.is_open:
      raise errors.UnsupportedOptionError(
        f'Preemption with a {type(self.strategy).__name__} without a model to '
        'save',
        'one that has the model and the optimizer',
        'call strategy.restore(model=model, optimizer=optimizer) before the '
        'loop',
      )

  def save(self, epoch: int, step: int) -> None:
    """Saves at once; fails if a server is gone as well."""
    del epoch, step  # The strategy counts the steps that it begins.
    self.check_open()
    try:
      # There is no time to wait for a server to come back.
      self.strategy.save(recovers=False)
    except (errors.Error, tf.errors.OpError) as e:
      raise errors.StorageError(f'the variables cannot be read: {e}') from e


@option_checks.has_options
class PreemptionCheckpoint(resume_fit.ResumeFit):
  """Saves after each epoch, and on SIGTERM after the current step; for `fit`.

  Make it the last callback: after a signal, callbacks behind it do not see the
  last step. It also resumes as `ResumeFit(checkpoint)`, which says what data
  `fit` needs. An epoch in whose last step the signal arrives, or after it, is not
  evaluated. After a `fit` that raised, a SIGTERM is kept for the next `fit` or
  `Preemption`.

  With parameter servers the strategy saves and restores by itself: pass the
  strategy, next to `tfs.ResumeFit(strategy)`.

  Example:

    epoch, _ = checkpoint.restore()
    model.fit(
      tfs.data.make_dataset(
        train, options, training=True, epochs=3, start=(epoch, 0),
        steps_per_epoch=100),
      initial_epoch=epoch, epochs=3, steps_per_epoch=100,
      callbacks=[tfs.PreemptionCheckpoint(checkpoint)])

  Args:
    checkpoint: as in `Preemption`, like `check_seconds`; `restore` was called.

  Raises:
    UnsupportedOptionError: as `Preemption` and `ResumeFit`.
  """

  def __init__(
    self,
    checkpoint: run_checkpoint.RunCheckpoint | tf.distribute.Strategy,
    check_seconds: float = 0.2,
  ):
    super().__init__(checkpoint)
    # With parameter servers, the strategy and `ResumeFit` do it.
    self._strategy = None
    self._preemption = Preemption(checkpoint, check_seconds)
    self._listens = False
    self._epoch = 0
    self._steps_before = 0

  def on_train_begin(self, logs=None):
    """Takes the position where the run continues."""
    self._listens = False
    super().on_train_begin(logs)

  def on_epoch_begin(self, epoch, logs=None):
    """Listens for signals; continues an epoch that was interrupted."""
    self._epoch = epoch
    super().on_epoch_begin(epoch, logs)
    if not self._listens:
      self._listens = True
      self._preemption.enter_for_fit()

  def on_train_batch_begin(self, batch, logs=None):
    """Counts the steps before this one, or this group of them."""
    self._steps_before = batch

  def on_train_batch_end(self, batch, logs=None):
    """Saves and exits if a worker was signalled."""
    if _keras_internal.is_skipped(self.model, batch):
      return
    if self._preemption.requested:
      done = self._steps_before + self.model.steps_per_execution
      steps = self.params.get('steps')
      if steps is not None and done >= steps:
        self._preemption.save_and_exit(self._epoch + 1, 0)
      self._preemption.save_and_exit(self._epoch, done)

  def on_test_batch_end(self, batch, logs=None):
    """Saves and exits during an evaluation by `fit`, too."""
    if self._preemption.is_requested(in_evaluation=True):
      self._preemption.save_and_exit(self._epoch + 1, 0)

  def on_epoch_end(self, epoch, logs=None):
    """Saves; exits if a worker was signalled since the last step."""
    if self._preemption.is_requested(at_once=True):
      self._preemption.save_and_exit(epoch + 1, 0)
    if self._checkpoint is not None:
      self._checkpoint.save(epoch + 1)

  def on_train_end(self, logs=None):
    """Restores signal handlers; raises a signal again that was not seen."""
    super().on_train_end(logs)
    self._preemption.__exit__(None, None, None)
