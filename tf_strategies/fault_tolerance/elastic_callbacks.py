"""Callbacks in an elastic job: progress, files, and state for workers that join.

EarlyStopping, ReduceLROnPlateau and others count epochs and keep the best value or
weights. A worker that joins a running `fit` takes this state from the other workers.
Without it, it would stop or change the learning rate at another time than they do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal, process_group
from tf_strategies.keras import chief_only

# They keep files open during `fit`, so their attributes describe one process only.
_KEEP_FILES_OPEN = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
# Stand in JSON for an array, by its number, and for a function of Keras, by its name.
_ARRAY, _OP = '__array__', '__op__'


class RecordProgress(keras.callbacks.Callback):
  """Records the progress of `fit` in the state of a job; the last callback.

  Args:
    state: the state of the job.
    skipped: number of completed steps of the first epoch.
  """

  def __init__(self, state: Any, skipped: int):
    super().__init__()
    self._state = state
    self._skipped = skipped

  def on_epoch_begin(self, epoch, logs=None):
    """Skips completed steps."""
    if self._skipped:
      _keras_internal.skip_steps(self._skipped, reads=False)
      self._skipped = 0

  def on_train_batch_begin(self, batch, logs=None):
    """Lets a worker that joined continue from the state of the others.

    The callbacks of the others heard of the begin of this batch, too.
    """
    self._state.enter_fit()

  def on_train_batch_end(self, batch, logs=None):
    """Counts a batch."""
    self._state.move(self._state.progress.epoch, batch + 1)

  def on_epoch_end(self, epoch, logs=None):
    """Counts an epoch, and keeps its logs."""
    self._state.history = self.model.history.history
    self._state.move(epoch + 1, 0)


class FilesOfJob(chief_only.ChiefOnly):
  """Lets the present chief write the files of one of Keras's callbacks.

  At the end of an epoch all workers wait for the chief and take the state of its
  callback. If it dies before that, its successor writes the files of the epoch.

  Args:
    callback: the callback that writes files.
    run_step: runs a function until a group of workers has done it.
    is_new: whether the job has not begun, so that the files are new.
  """

  def __init__(
    self,
    callback: keras.callbacks.Callback,
    run_step: Callable[..., Any],
    is_new: bool,
  ):
    super().__init__(callback)
    self._run_step = run_step
    if isinstance(callback, keras.callbacks.CSVLogger) and not is_new:
      callback.append = True
    self._is_training = False
    self._epoch = 0

  def on_epoch_end(self, epoch, logs=None):
    """Returns when a chief has written the files of the epoch."""
    link = self._strategy().extended.communicator
    has_written = False

    def write():
      nonlocal has_written
      if link.rank == 0 and not has_written:
        is_successor = not self._has_model
        self._tell_chief()
        if not (is_successor and self._has_row(epoch)):
          self.callback.on_epoch_end(epoch, logs)
        has_written = True
      known = hand_on(link.group, 0, 'files', pack([self.callback]))
      if link.rank:
        unpack(known, [self.callback])

    self._run_step('test', write, lambda: None, tf.constant([epoch]))

  def _has_row(self, epoch):
    """Returns whether a chief that died has written the row of an epoch."""
    if not isinstance(self.callback, keras.callbacks.CSVLogger):
      return False
    with open(self.callback.filename, encoding='utf-8') as file:
      *_, last = ['', *file]
    return last.split(self.callback.sep)[0] == str(epoch)

  def _call(self, event, *args):
    if event == 'on_epoch_begin':
      self._epoch = args[0]
    # Validation does not begin and end on different chiefs.
    if self._has_model or '_test_' not in event:
      super()._call(event, *args)
    if event in ('on_train_begin', 'on_train_end'):
      self._is_training = event == 'on_train_begin'

  def _tell_chief(self):
    """Opens files when this worker becomes the chief; closes them afterwards."""
    was_chief = self._has_model
    is_chief = super()._tell_chief()
    self._has_model = is_chief
    if self._is_training and is_chief != was_chief:
      keeps_open = isinstance(self.callback, _KEEP_FILES_OPEN)
      if is_chief:
        if keeps_open:
          self.callback.append = True
          self.callback.on_train_begin()
        self.callback.on_epoch_begin(self._epoch)
      elif keeps_open:
        self.callback.on_train_end()
    return is_chief


def pack(callbacks: Sequence[keras.callbacks.Callback]) -> list[np.ndarray]:
  """Returns the numbers, texts and arrays among the attributes of callbacks.

  Returns:
    JSON text as uint8 [n], and the arrays that the text refers to.

  Example:

    >>> from tf_strategies.fault_tolerance import elastic_callbacks
    >>> stop = keras.callbacks.EarlyStopping()
    >>> stop.wait = 3
    >>> packed = elastic_callbacks.pack([stop])
    >>> other = keras.callbacks.EarlyStopping()
    >>> elastic_callbacks.unpack(packed, [other])
    >>> other.wait
    3
  """
  arrays: list[np.ndarray] = []

  def to_json(value):
    if isinstance(value, np.generic):
      return value.item()
    if isinstance(value, np.ndarray):
      arrays.append(value)
      return {_ARRAY: len(arrays) - 1}
    return {_OP: value.__name__}

  told = []
  for callback in map(_inner, callbacks):
    keeps_open = isinstance(callback, _KEEP_FILES_OPEN)
    attributes = {
      name: value
      for name, value in vars(callback).items()
      if not keeps_open and name != 'params' and _is_packed(value)
    }
    told.append([type(callback).__name__, attributes])
  text = json.dumps(told, default=to_json).encode()
  return [np.frombuffer(text, np.uint8), *arrays]


def unpack(
  packed: Sequence[np.ndarray], callbacks: Sequence[keras.callbacks.Callback]
) -> None:
  """Assigns packed attributes to callbacks, if these are of the same classes."""
  text, *arrays = packed

  def from_json(value):
    if _ARRAY in value:
      return arrays[value[_ARRAY]]
    return _op(value[_OP]) if _OP in value else value

  told = json.loads(text.tobytes(), object_hook=from_json)
  callbacks = [_inner(callback) for callback in callbacks]
  classes = [name for name, _ in told]
  if classes != [type(callback).__name__ for callback in callbacks]:
    logging.warning(
      'The callbacks of this worker differ from %s, the callbacks of the other '
      'workers: they start from scratch.',
      classes,
    )
    return
  for callback, (_, attributes) in zip(callbacks, told, strict=True):
    for name, value in attributes.items():
      setattr(callback, name, value)


def hand_on(
  group: process_group.ProcessGroup,
  root: int,
  what: str,
  arrays: Sequence[np.ndarray],
) -> list[np.ndarray]:
  """Returns the arrays of rank `root`; all workers call it.

  The arrays of the other ranks are ignored, and may be of other shapes.
  """
  mine = json.dumps([(a.dtype.name, a.shape) for a in arrays])
  answers = group.exchange(f'elastic/{what}', mine.encode())
  handed = []
  for i, (dtype, shape) in enumerate(json.loads(answers[root])):
    array = arrays[i] if group.rank == root else np.zeros(shape, dtype)
    handed.append(group.broadcast(array, root, name=f'elastic/{what}/{i}'))
  return handed


def _inner(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
  """Returns the callback inside a wrapper such as `ChiefOnly`."""
  return getattr(callback, 'callback', callback)


def _op(name: str) -> Any:
  """Returns a function of Keras, such as the comparison that a callback uses."""
  return getattr(keras.ops, name, None)


def _is_packed(value: Any) -> bool:
  """Returns whether `pack` takes an attribute with this value."""
  if isinstance(value, dict):
    return all(isinstance(k, str) and _is_packed(v) for k, v in value.items())
  if isinstance(value, list):
    return all(map(_is_packed, value))
  if isinstance(value, np.ndarray):
    return value.dtype.kind in 'biufV'
  if isinstance(value, np.generic):
    value = value.item()
  is_op = value is _op(getattr(value, '__name__', ''))  # So is None.
  return is_op or isinstance(value, bool | int | float | str)
