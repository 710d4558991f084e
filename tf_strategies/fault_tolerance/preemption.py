"""`Preemption`: tells all workers, after the same step, that one received SIGTERM.

A scheduler sends SIGTERM and, half a minute later, SIGKILL. The signal sets a flag.
After a step the workers exchange their flags, so that all of them save and exit after
the same step. SIGINT is not handled: Ctrl-C ends the run.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies.cluster import workers as workers_lib

# Approximate time between two exchanges.
_CHECK_SECONDS = 0.2
# Most steps between two exchanges: a worker may become slow suddenly.
_MOST_STEPS = 1000


class Preemption:
  """Listens for SIGTERM in this process, and asks the other workers.

  Workers exchange flags in a small collective, at a step that all agree on.

  Args:
    strategy: the strategy whose workers train together.
  """

  # Listens for a `fit` that has not ended: Keras does not report one that raised.
  _in_fit: Preemption | None = None

  def __init__(self, strategy: tf.distribute.Strategy):
    workers = workers_lib.link_of(strategy)
    is_alone = workers is None or workers.world_size == 1
    self.workers = None if is_alone else workers
    self.is_listening = False
    self._handler: Any = None
    # In this process; in any, and seen by `is_requested`.
    self._is_signalled = self._is_requested = False
    self._in_evaluation = False
    self._steps = 1  # From one exchange to the next.
    self._steps_done = 0
    self._asked_at = time.monotonic()

  def listen(self, in_fit: bool = False) -> None:
    """Starts to listen; a second signal has no effect.

    Args:
      in_fit: whether this is for a `fit`. If that raises, nobody calls `stop`; then
        the next `listen` of the process does.
    """
    abandoned, Preemption._in_fit = Preemption._in_fit, None
    is_unseen = abandoned is not None and abandoned.stop()
    self._is_signalled = self._is_requested = False
    self.is_listening = True
    if in_fit:
      Preemption._in_fit = self
    if threading.current_thread() is threading.main_thread():
      self._handler = signal.signal(signal.SIGTERM, self._on_signal)
    else:
      logging.warning(
        'SIGTERM does not save: Python receives signals in the main thread, and '
        'this run trains in thread %r.',
        threading.current_thread().name,
      )
    if is_unseen:
      signal.raise_signal(signal.SIGTERM)

  @property
  def listens_in_fit(self) -> bool:
    """Returns whether this object listens for a `fit`, not for a context."""
    return Preemption._in_fit is self

  def stop(self) -> bool:
    """Restores the handler; returns whether a signal has remained unnoticed."""
    if self.listens_in_fit:
      Preemption._in_fit = None
    is_main = threading.current_thread() is threading.main_thread()
    if self.is_listening and is_main:
      # None: it was not set by Python code.
      signal.signal(signal.SIGTERM, self._handler or signal.SIG_DFL)
    self.is_listening = False
    return self._is_signalled and not self._is_requested

  def _on_signal(self, number, frame):
    # No logging: the signal may have interrupted a logging call.
    self._is_signalled = True

  def is_requested(
    self, at_once: bool = False, in_evaluation: bool = False
  ) -> bool:
    """Returns whether a worker was signalled; the same on all, after each step.

    Args:
      at_once: whether to exchange flags regardless of the time, on all workers.
      in_evaluation: whether this is called after a batch of an evaluation.
    """
    if self.workers is None:
      self._is_requested = self._is_signalled
      return self._is_signalled
    if in_evaluation != self._in_evaluation:
      # Its batches take a different time than training steps.
      self._in_evaluation = in_evaluation
      self._steps, self._steps_done = 1, 0
    if not at_once:  # Otherwise there may have been no step.
      self._steps_done += 1
    if at_once or self._steps_done >= self._steps:
      # The slowest worker decides when to ask next.
      mine = np.array([[self._is_signalled, self._steps_wanted()]], np.int64)
      everyone = self.workers.all_gather(tf.constant(mine), 'preemption')
      signalled, steps = everyone.numpy().T.tolist()
      self._steps, self._is_requested = min(steps), any(signalled)
    return self._is_requested

  def _steps_wanted(self) -> int:
    """Returns how many steps this worker does until the next exchange."""
    now = time.monotonic()
    steps = self._steps
    if self._steps_done:
      seconds = max(now - self._asked_at, 1e-6)
      steps = _CHECK_SECONDS * self._steps_done / seconds
    self._asked_at, self._steps_done = now, 0
    return int(min(max(steps, 1), _MOST_STEPS))
