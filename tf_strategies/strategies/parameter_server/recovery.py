"""Checkpoints, and going on after a parameter server has died."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors
from tf_strategies.strategies.parameter_server import resumption, worker_input

_T = TypeVar('_T')
_MAX_TO_KEEP = 3
_MAX_ATTEMPTS = 5
_RETRY_SECONDS = 1.0
_CHIEF = '/job:chief/replica:0/task:0/device:CPU:0'


class Recovery:
  """Saves what a strategy trains, and restores it when a server died.

  The files are written by the coordinator, so that servers need no file system
  in common.

  Args:
    strategy: a `ParameterServerStrategy`.
  """

  def __init__(self, strategy):
    self._strategy = strategy
    self._options = strategy.options
    self._tracked: dict[str, Any] | None = None
    self._is_tracking = False
    self._manager: tf.train.CheckpointManager | None = None
    self._position_variable = None
    self._is_recovering = False
    # Steps begun in this process; and the number when the last was saved.
    self.begun = 0
    self._begun_at_save = 0
    self._begun_before = 0
    self._epoch = 0
    self._epoch_began = 0
    self._source: worker_input.Source | None = None
    self._resumption: resumption.Resumption | None = None
    self._was_restored = False
    self._steps_done = 0
    self.history: list[dict[str, Any]] = []

  @property
  def is_enabled(self) -> bool:
    """Whether checkpoints are written."""
    return self._options.checkpoint_dir is not None

  @property
  def is_open(self) -> bool:
    """Whether it is known what checkpoints hold."""
    return self._manager is not None

  def track(self, trackables: dict[str, Any]) -> None:
    """Says what checkpoints hold; writes a first one if there is none.

    Args:
      trackables: by name, as for `tf.train.Checkpoint`: model and optimizer.
    """
    if not self.is_enabled or self._is_tracking:
      return
    self._is_tracking = True
    if self._tracked is None:
      self._open(trackables)
    if self._manager.latest_checkpoint is None:
      self.save()
    elif not self._was_restored:
      logging.warning(
        '%s has a checkpoint that was not restored: this run begins anew. To '
        'go on, pass callbacks=[tfs.ResumeFit(strategy)] to fit, or call '
        'strategy.restore in a loop.',
        self._options.checkpoint_dir,
      )
      self.save()

  def _open(self, trackables):
    with tf.device(_CHIEF):
      # Not of the strategy: it is the coordinator's own.
      self._position_variable = _tf_internal.ResourceVariable(
        '', trainable=False
      )
    self._tracked = dict(trackables)
    checkpoint = tf.train.Checkpoint(
      **trackables, position=self._position_variable
    )
    self._manager = tf.train.CheckpointManager(
      checkpoint, self._options.checkpoint_dir, max_to_keep=_MAX_TO_KEEP
    )

  def begin_epoch(self, epoch: int) -> None:
    """Says which epoch begins; that of a resumed run began before."""
    done = self._resumption.epoch_steps if self._resumption else 0
    self._epoch = epoch
    self._epoch_began = self.begun - done

  def resume(self, resumption_: resumption.Resumption) -> None:
    """The next data set that is read is read from there on."""
    self._resumption = resumption_
    self._steps_done = resumption_.epoch_steps

  def take_steps_done(self) -> int:
    """Steps of the resumed epoch that Keras must not do again; tells it once.

    The first step of an epoch is always done.
    """
    taken, self._steps_done = self._steps_done, 0
    return taken

  def take_resumption(self) -> resumption.Resumption | None:
    """Where the data set that is being opened goes on; tells it once."""
    taken, self._resumption = self._resumption, None
    return taken

  def note_begun(
    self, steps: int, source: worker_input.Source | None = None
  ) -> None:
    """Counts steps that were begun; saves when it is time.

    Args:
      steps: how many.
      source: of their data, where workers read.
    """
    self.begun += steps
    self._source = source
    every = self._options.checkpoint_steps
    if self.is_enabled and self.begun - self._begun_at_save >= every:
      self.with_recovery(self.save)

  def save(self) -> str | None:
    """Waits for all steps and writes a checkpoint; returns its path."""
    if self._manager is None:
      return None
    self._strategy.drain()
    self._position_variable.assign(json.dumps(self._position()))
    path = self._manager.save(
      checkpoint_number=self._next_number(),
      options=tf.train.CheckpointOptions(experimental_io_device=_CHIEF),
    )
    self._begun_at_save = self.begun
    return path

  def _position(self) -> dict[str, Any]:
    """Where the run is, when all steps that were begun are done."""
    splits = self._source.splits if self._source else ()
    return {
      'steps': self._begun_before + self.begun,
      'epoch': self._epoch,
      'epoch_steps': self.begun - self._epoch_began,
      'splits': [split.done for split in splits],
    }

  def _next_number(self) -> int:
    latest = self._manager.latest_checkpoint
    return 1 if latest is None else int(latest.rpartition('-')[2]) + 1

  def restore(self, trackables: dict[str, Any]) -> dict[str, Any] | None:
    """Restores the latest checkpoint of an earlier run.

    Args:
      trackables: what checkpoints hold, with all variables made.

    Returns:
      The position that was saved; None if there is no checkpoint.

    Raises:
      CheckpointMismatchError: the checkpoint is another model's.
    """
    if not self.is_enabled:
      return None
    if self._tracked is None:
      self._open(trackables)
    if self._manager.latest_checkpoint is None:
      return None
    self._read()
    self._was_restored = True
    position = json.loads(self._position_variable.numpy() or b'{}')
    self._begun_before = position.get('steps', 0)
    logging.info('restored %s', self._manager.latest_checkpoint)
    return position

  def _read(self) -> None:
    path = self._manager.latest_checkpoint
    options = tf.train.CheckpointOptions(experimental_io_device=_CHIEF)
    try:
      status = self._manager.checkpoint.restore(path, options)
      status.assert_existing_objects_matched()
    except (AssertionError, ValueError) as e:
      raise errors.CheckpointMismatchError(
        f'{path} is not a checkpoint of this model: {e}. Fix: another '
        'checkpoint_dir, or the model that wrote it.'
      ) from e

  def with_recovery(self, action: Callable[[], _T]) -> _T:
    """Does something; if a server died, recovers and does it again.

    Raises:
      ParameterServerUnavailableError: a server died and there is no checkpoint.
      RendezvousError: it did not come back within `recovery_timeout`.
    """
    if self._is_recovering:
      return action()
    while True:
      try:
        return action()
      except errors.ParameterServerUnavailableError as e:
        error = e
      except tf.errors.OpError as e:
        _tf_internal.clear_errors()
        explained = self._strategy.engine.pool.explain(e)
        if explained is e:
          if not self._strategy.liveness.changed_recently():
            raise
          time.sleep(_RETRY_SECONDS)
          continue
        error = explained
      self._recover(error)

  def _recover(self, error) -> None:
    if self._manager is None:
      raise error
    began = time.monotonic()
    logging.error('%s Waiting for it.', error)
    self._is_recovering = True
    try:
      for attempt in range(_MAX_ATTEMPTS):
        try:
          self._restore_servers()
          break
        except (
          errors.ParameterServerUnavailableError,
          tf.errors.OpError,
        ) as e:
          if attempt == _MAX_ATTEMPTS - 1:
            raise
          logging.warning('recovery: %s; trying again', e)
          _tf_internal.clear_errors()
          time.sleep(_RETRY_SECONDS)
    finally:
      self._is_recovering = False
    lost = self.begun - self._begun_at_save
    self._begun_at_save = self.begun
    seconds = time.monotonic() - began
    self.history.append(
      {'server': error.server, 'lost_steps': lost, 'seconds': seconds}
    )
    logging.error(
      'ps %s is back: restored %s after %.1f s. Lost: %d steps.',
      error.server,
      os.path.basename(self._manager.latest_checkpoint),
      seconds,
      lost,
    )

  def _restore_servers(self) -> None:
    """Waits for the servers, makes the variables anew and reads them."""
    strategy = self._strategy
    strategy.engine.pool.forget()
    strategy.liveness.wait_for_all(self._options.recovery_timeout)
    strategy.make_lost_variables()
    strategy.engine.forget_functions()
    strategy.engine.lose_all_readers()
    self._read()
    names = [v.name for v in strategy.lost_variables()]
    if names:
      logging.warning(
        'not in the checkpoint, and zero from now on: %s', ', '.join(names)
      )
