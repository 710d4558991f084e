"""The callback of an elastic job, and what other callbacks remember.

The second is for a worker that enters a `fit` that has begun.

EarlyStopping, ReduceLROnPlateau and their like count epochs and keep the best value,
or weights. A worker that knew none of that would stop, or change the learning rate,
when the others do not. So its callbacks take what the callbacks of the others know.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal
from tf_strategies.keras import chief_only

_META = 'meta'
# Their files are open during `fit`; what they know of them is this worker's.
_KEEP_FILES_OPEN = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


class Progress(keras.callbacks.Callback):
  """Records the progress of `fit` in the state of a job; the last callback.

  Args:
    state: of the job.
    skipped: completed steps of the first epoch.
  """

  def __init__(self, state: Any, skipped: int):
    super().__init__()
    self._state = state
    self._skipped = skipped

  def on_epoch_begin(self, epoch, logs=None):
    """Skips completed steps."""
    self._state.begin_epoch()
    if self._skipped:
      _keras_internal.skip_steps(self._skipped, reads=False)
      self._skipped = 0

  def on_train_batch_begin(self, batch, logs=None):
    """Lets callbacks of a worker that came late continue as those of the others.

    The others had heard of the begin of this batch, so these have, too.
    """
    self._state.take_callbacks()

  def on_train_batch_end(self, batch, logs=None):
    """Counts a batch."""
    self._state.finish_batch(batch + 1)

  def on_epoch_end(self, epoch, logs=None):
    """Counts an epoch."""
    self._state.start_at(epoch + 1, 0)


class FilesOfJob(chief_only.ChiefOnly):
  """Has the chief write the files of Keras's callback, whichever worker that is.

  At the end of an epoch all workers wait for the chief and take what its callback
  knows. If it dies before that, its successor writes the files of the epoch.

  Args:
    callback: writes files.
    run_step: runs a function until a group of workers has done it.
    is_new: whether the job has not begun, so that files are new.
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

  def on_train_begin(self, logs=None):
    """Calls the callback, on the chief."""
    self._call('on_train_begin', logs)
    self._is_training = True

  def on_epoch_begin(self, epoch, logs=None):
    """Calls the callback, on the chief."""
    self._epoch = epoch
    self._call('on_epoch_begin', epoch, logs)

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
      known = link.exchange('files', pack([self.callback]).tobytes())
      if link.rank:
        unpack(np.frombuffer(known[0], np.uint8), [self.callback])

    self._run_step('test', write, lambda: None, tf.constant([epoch]))

  def on_train_end(self, logs=None):
    """Calls the callback, on the chief."""
    self._call('on_train_end', logs)
    self._is_training = False

  def _has_row(self, epoch):
    """Returns whether a chief that died has written the row of an epoch."""
    if not isinstance(self.callback, keras.callbacks.CSVLogger):
      return False
    with open(self.callback.filename, encoding='utf-8') as file:
      *_, last = ['', *file]
    return last.split(self.callback.sep)[0] == str(epoch)

  def _call(self, event, *args):
    # Validation does not begin and end on different chiefs.
    if self._has_model or '_test_' not in event:
      super()._call(event, *args)

  def _tell_chief(self):
    """Opens files where this worker becomes the chief, and closes them after it."""
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


def pack(callbacks: Sequence[keras.callbacks.Callback]) -> np.ndarray:
  """The numbers, texts and arrays among the attributes of callbacks, uint8 [n].

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
  meta, arrays = [], {}
  for i, callback in enumerate(map(_inner, callbacks)):
    plain = {}
    attributes = vars(callback)
    if isinstance(callback, _KEEP_FILES_OPEN):
      attributes = {}
    for name, value in attributes.items():
      if isinstance(value, np.generic):
        value = value.item()
      parts = value if isinstance(value, list) else [value]
      if parts and all(isinstance(part, np.ndarray) for part in parts):
        plain[name] = {'arrays': len(parts), 'is_list': value is parts}
        arrays.update({f'{i}/{name}/{j}': p for j, p in enumerate(parts)})
      elif value is not None and value is _op(getattr(value, '__name__', '')):
        plain[name] = {'op': value.__name__}
      elif name != 'params' and _is_plain(value):
        plain[name] = {'value': value}
    meta.append({'class': type(callback).__name__, 'attributes': plain})
  arrays[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
  file = io.BytesIO()
  np.savez(file, **arrays)
  return np.frombuffer(file.getvalue(), np.uint8)


def unpack(
  packed: np.ndarray, callbacks: Sequence[keras.callbacks.Callback]
) -> None:
  """Assigns packed attributes to callbacks, if these are of the same classes."""
  with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as arrays:
    meta = json.loads(arrays[_META].tobytes())
    callbacks = [_inner(callback) for callback in callbacks]
    classes = [about['class'] for about in meta]
    if classes != [type(callback).__name__ for callback in callbacks]:
      logging.warning(
        'The callbacks of this worker differ from %s, the callbacks of the other '
        'workers: they start from scratch.',
        classes,
      )
      return
    for i, (about, callback) in enumerate(zip(meta, callbacks, strict=True)):
      for name, found in about['attributes'].items():
        if 'arrays' not in found:
          value = _op(found['op']) if 'op' in found else found['value']
          setattr(callback, name, value)
          continue
        parts = [arrays[f'{i}/{name}/{j}'] for j in range(found['arrays'])]
        setattr(callback, name, parts if found['is_list'] else parts[0])


def _inner(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
  """Returns the callback inside a wrapper such as `ChiefOnly`."""
  return getattr(callback, 'callback', callback)


def _op(name: str) -> Any:
  """A function of Keras, such as the comparison that a callback has chosen."""
  return getattr(keras.ops, name, None)


def _is_plain(value: Any) -> bool:
  if isinstance(value, dict):
    return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
  if isinstance(value, list):
    return all(map(_is_plain, value))
  return value is None or isinstance(value, bool | int | float | str)
