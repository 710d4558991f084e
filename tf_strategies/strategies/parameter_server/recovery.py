"""Checkpoints, and continuing after a parameter server has died."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors
from tf_strategies.checkpoint import checkpointer, model_state
from tf_strategies.checkpoint import position as position_lib
from tf_strategies.strategies.parameter_server import (
  connection,
  input,
  splits,
  table_files,
  variables,
  worker_pool,
)
from tf_strategies.strategies.parameter_server import options as options_lib

_T = TypeVar('_T')
_MAX_TO_KEEP = 3
_MAX_ATTEMPTS = 5
_RETRY_SECONDS = 1.0


class Recovery:
  """Saves what a strategy trains, and restores it when a server died.

  The chief reads and writes the files, so tasks need no common file system.

  When a server dies, all variables are restored, to the state of one moment. Steps that
  were done or begun since then are lost.
  """

  def __init__(
    self,
    options: options_lib.ParameterServerOptions,
    liveness: connection.Liveness,
    pool: worker_pool.WorkerPool,
    server_variables: Mapping[int, variables.ServerVariable],
  ):
    self._options = options
    self._liveness = liveness
    self._pool = pool
    self._variables = server_variables
    # Called when variables have been created again, before they are restored.
    self.on_restored: Callable[[], None] = lambda: None
    self._checkpointer: checkpointer.Checkpointer | None = None
    if options.checkpoint_dir is not None:
      self._checkpointer = checkpointer.Checkpointer(
        options.checkpoint_dir, _MAX_TO_KEEP
      )
      self._checkpointer.acquire()
    self._objects: Mapping[str, Any] | None = None
    # Tells this run from others, in each checkpoint.
    self._settings: Mapping[str, Any] = {}
    self._is_guarding = False
    # Whether it restores what an earlier run has saved.
    self._is_loading = False
    # The death of a server since which no checkpoint has been restored.
    self._loss: errors.ParameterServerUnavailableError | None = None
    # The first checkpoint of this run: older ones are of another run, if this one does
    # not continue it.
    self._first: str | None = None
    # Steps that earlier runs have begun, of which this one restored a checkpoint, and
    # this process: all, up to this epoch, and up to the checkpoint that was written or
    # restored last.
    self.begun_before = 0
    self._begun = self._begun_at_epoch = self._begun_at_newest = 0
    self._newest: str | None = None
    self._epoch = 0
    self._source: splits.Source | None = None
    self._resumed: input.Resumed | None = None
    self.history: list[dict[str, Any]] = []

  @property
  def is_enabled(self) -> bool:
    """Returns whether checkpoints are written."""
    return self._checkpointer is not None

  @property
  def is_open(self) -> bool:
    """Returns whether it is known what checkpoints hold."""
    return self._objects is not None

  def track(self, objects: Mapping[str, Any]) -> bool:
    """Says what checkpoints hold, once; returns whether one must be written."""
    if not self.is_enabled:
      return False
    self._objects = self._objects or dict(objects)
    if self._newest is not None:
      return False
    if self._checkpointer.paths():
      logging.warning(
        '%s has a checkpoint that was not restored: this run starts from '
        'scratch. To continue it, pass callbacks=[tfs.Run(checkpoint_dir, model)] '
        'to fit, or call restore of a tfs.Run in a loop.',
        self._options.checkpoint_dir,
      )
    return True

  def begin_epoch(self, epoch: int) -> None:
    """Notes that an epoch begins, or that a resumed one continues."""
    self._epoch = epoch
    step = self._resumed[0].step if self._resumed else 0
    self._begun_at_epoch = self._begun - step

  def resume(
    self, position: position_lib.Position, steps_per_epoch: int | None
  ) -> None:
    """The next data set that is read is read from there on."""
    self._resumed = position, steps_per_epoch

  def take_resumed(self) -> input.Resumed | None:
    """Returns where the next data set continues; None from the second call on."""
    taken, self._resumed = self._resumed, None
    return taken

  def note_begun(self, work: Any) -> bool:
    """Counts a step that was begun; returns whether a checkpoint is due."""
    self._begun += 1
    self._source = work if isinstance(work, splits.Source) else None
    since = self._begun - self._begun_at_newest
    return self.is_enabled and since >= self._options.checkpoint_steps

  def mark_finished(self, is_finished: bool) -> None:
    """Tells those who read checkpoints whether more will follow."""
    if self.is_enabled:
      self._checkpointer.mark_finished(is_finished)

  def close(self) -> None:
    """Lets another process write into the directory."""
    if self.is_enabled:
      self._checkpointer.release()

  def write(self) -> str | None:
    """Writes a checkpoint; all steps must be done. Returns its path."""
    # No checkpoint has variables that are lost.
    self._pool.check_accepts()
    if self._objects is None:
      return None
    read = self._source.position if self._source else ()
    step = self._begun - self._begun_at_epoch
    position = position_lib.Position(self._epoch, step, read)
    named = model_state.name_objects(self._objects)
    path = self._checkpointer.save(
      table_files.arrays_of(named),
      {
        **position.to_json(),
        'steps': self.begun_before + self._begun,
        'settings': self._settings,
        'parts': model_state.reductions(named),
      },
    )
    if self._newest is None:
      self._first = path
    self._note_newest(path)
    return path

  def _note_newest(self, path: str) -> None:
    """Notes that steps which begin now start from the values of a checkpoint."""
    self._newest, self._begun_at_newest = path, self._begun

  def restore(
    self,
    objects: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
  ) -> position_lib.Position | None:
    """Restores the newest whole checkpoint of an earlier run, if there is one.

    Returns its position. All variables of the objects must have been made.
    `settings` must be those of that run.
    """
    if not self.is_enabled:
      return None
    self._objects = self._objects or dict(objects)
    self._settings = settings or {}
    self._is_loading = True
    try:
      found = self.with_recovery(self._read_newest)
    finally:
      self._is_loading = False
    if found is None:
      return None
    self._note_newest(found.path)
    self.begun_before = found.metadata['steps']
    position = position_lib.Position.from_json(found.metadata)
    self._checkpointer.log_restored(found, position)
    return position

  def _read_newest(self) -> checkpointer.Checkpoint | None:
    """Assigns the variables what the newest whole checkpoint has.

    Not one of another run, which is in the directory too.
    """
    found = self._checkpointer.newest(self._first)
    if found is None:
      return None
    if 'steps' not in found.metadata:
      raise errors.CheckpointMismatchError(
        'Expected a checkpoint of a ParameterServerStrategy, got '
        f'{found.path} of another strategy (tfs.Run). Fix: pass another '
        'checkpoint_dir.'
      )
    named = model_state.name_objects(self._objects)
    specs = model_state.matched(
      found, named, found.arrays.specs, self._settings
    )
    lost = [v for v in self._variables.values() if v.is_lost]
    try:
      table_files.restore(found.arrays.with_specs(specs), named)
    except BaseException:
      # Some variables may hold only a part of their values. The next attempt restores them.
      for variable in lost:
        variable.is_lost = True
      raise
    return found

  def with_recovery(self, action: Callable[[], _T]) -> _T:
    """Does something; if a server died, recovers and does it again.

    Nested calls do not recover: the outermost call is repeated.
    """
    if self._is_guarding:
      return action()
    self._is_guarding = True
    try:
      while True:
        if self._loss is not None:
          # Also of an earlier call, which could not restore it.
          self._recover(self._loss)
        try:
          return action()
        except errors.ParameterServerUnavailableError as e:
          self._lose(e)
        except tf.errors.OpError:
          _tf_internal.clear_errors()
          error = self._liveness.server_error()
          if error is not None:
            self._lose(error)
          elif self._liveness.changed_recently():
            time.sleep(_RETRY_SECONDS)
          else:
            raise
    finally:
      self._is_guarding = False

  def _lose(self, error: errors.ParameterServerUnavailableError) -> None:
    """Notes that variables are lost: from now on nothing is done with them."""
    self._loss = self._pool.refusal = error

  def _recover(self, error: errors.ParameterServerUnavailableError) -> None:
    began = time.monotonic()
    try:
      found = self._try_to_restore(error)
    except Exception as e:
      self._pool.refusal = e
      raise
    self._loss = self._pool.refusal = None
    seconds = time.monotonic() - began
    lost_steps = 0 if self._is_loading else self._begun_since(found)
    self._note_newest(found.path)
    self.history.append(
      {'server': error.server, 'lost_steps': lost_steps, 'seconds': seconds}
    )
    logging.error(
      f'ps {error.server} is back: restored {os.path.basename(found.path)} after '
      f'{seconds:.1f} s. Lost: {lost_steps} steps.'
    )

  def _begun_since(self, found: checkpointer.Checkpoint) -> int:
    """Returns how many steps begun since a checkpoint was written or restored."""
    if found.path == self._newest:
      return self._begun - self._begun_at_newest
    return self.begun_before + self._begun - found.metadata['steps']

  def _try_to_restore(
    self, error: errors.ParameterServerUnavailableError
  ) -> checkpointer.Checkpoint:
    """Restores variables after `error`, or raises a typed error."""
    if not self.is_enabled:
      raise error
    if self._newest is None and not self._is_loading:
      raise connection.unavailable(
        f'ps {error.server} at {error.address} died before this run had written a '
        'checkpoint. Fix: restart the job; in a loop of your own, call '
        'strategy.track or strategy.restore before the first step.',
        error.server,
        error.address,
      )
    logging.error('%s Waiting for it.', error)
    for attempt in range(_MAX_ATTEMPTS):
      try:
        return self._restore_servers()
      except (errors.ParameterServerUnavailableError, tf.errors.OpError) as e:
        if attempt == _MAX_ATTEMPTS - 1:
          raise connection.unavailable(
            f'the variables of ps {error.server} at {error.address} could not be '
            f'restored in {_MAX_ATTEMPTS} attempts: {e}. Fix: see the logs of '
            'the servers, and restart the job.',
            error.server,
            error.address,
          ) from e
        logging.warning('recovery: %s; trying again', e)
        _tf_internal.clear_errors()
        time.sleep(_RETRY_SECONDS)

  def _restore_servers(self) -> checkpointer.Checkpoint:
    """Waits for all servers, recreates the variables and restores them."""
    self._pool.forget()
    self._liveness.wait_for_all(self._options.recovery_timeout)
    for variable in self._variables.values():
      variable.recreate_if_dead()
    variables.update_functions(self._variables.values())
    self.on_restored()
    found = self._read_newest()
    if found is None:
      raise errors.DataError(
        f'Expected a checkpoint in {self._options.checkpoint_dir} to restore '
        'the variables of a server that died, got none. Fix: put one back, or '
        'restart the job from scratch.'
      )
    lost = [v for v in self._variables.values() if v.is_lost]
    for kind, what in (
      (True, 'count from zero from now on'),
      (False, 'must be assigned before they are used'),
    ):
      names = [v.name for v in lost if v.is_counter == kind]
      if names:
        logging.warning('not in the checkpoint: %s %s', ', '.join(names), what)
    return found
