"""The callback of an elastic job, and what other callbacks remember.

The second is for a worker that enters a `fit` that has begun.

EarlyStopping, ReduceLROnPlateau and their like count epochs and keep the best value,
or weights. A worker that knew none of that would stop, or change the learning rate,
when the others do not. As its callbacks know what was done, they hear no events of it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal
from tf_strategies.fault_tolerance import resume_fit
from tf_strategies.keras import chief_only
from tf_strategies.monitoring import keras_callback

_META = 'meta'
# Their files are open during `fit`; what they know of them is this worker's.
_KEEP_FILES_OPEN = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
# What the others' callbacks have heard, when a worker enters before a step.
_OF_DONE_WORK = ('on_epoch_begin', 'on_train_batch_begin', 'on_train_batch_end')


class ElasticCallback(keras.callbacks.Callback):
  """Records the progress of `fit` in a job.

  Of the first epoch `first_step` batches are done, which this `fit` does not
  count, or `skipped`, which it counts and skips.
  """

  def __init__(
    self, job: Any, first_step: int = 0, skipped: int = 0, reads: bool = True
  ):
    super().__init__()
    self._job = job
    self._first_step = first_step
    self._skipped = skipped
    self._reads = reads
    # Callbacks that are to hear nothing of what the others did.
    self._deaf: Sequence[keras.callbacks.Callback] = ()

  def on_train_begin(self, logs=None):
    """Lets other callbacks, which have begun, go on as those of other workers."""
    self._deaf = [
      callback
      for callback in self._job.begin_fit()
      # It measures this worker.
      if not isinstance(callback, keras_callback.MonitorCallback)
      # `FilesOfJob` says what it hears.
      and not (self._job.files_are_common and chief_only.path_of(callback))
    ]
    for callback in self._deaf:
      vars(callback).update(dict.fromkeys(_OF_DONE_WORK, _ignore))

  def on_epoch_begin(self, epoch, logs=None):
    """Skips what was done."""
    self._job.begin_epoch()
    if self._skipped:
      resume_fit.skip_steps(self.model, self._skipped, self._reads)
      self._skipped = 0

  def on_train_batch_begin(self, batch, logs=None):
    """Lets callbacks hear again, from the end of the first batch that is not done."""
    if not _keras_internal.is_skipped(self.model, batch):
      for callback in self._deaf:
        for name in _OF_DONE_WORK:
          del vars(callback)[name]
      self._deaf = ()

  def on_train_batch_end(self, batch, logs=None):
    """Counts a batch."""
    if not _keras_internal.is_skipped(self.model, batch):
      self._job.finish_batch(self._first_step + batch + 1)

  def on_epoch_end(self, epoch, logs=None):
    """Counts an epoch."""
    self._first_step = 0
    self._job.finish_epoch(epoch + 1)


class FilesOfJob(chief_only.ChiefOnly):
  """Has the chief write the files of Keras's callback, whichever worker that is.

  At the end of an epoch all workers wait for the chief and take what its callback
  knows. If it dies before that, its successor writes the files of the epoch.
  """

  def __init__(self, callback: keras.callbacks.Callback, members: Any):
    super().__init__(callback)
    self._members = members
    self._is_training = False
    self._epoch = 0

  def on_train_begin(self, logs=None):
    """Calls the callback; a job that goes on adds to its files."""
    is_new = self._members.job.place == (0, 0)
    if isinstance(self.callback, keras.callbacks.CSVLogger) and not is_new:
      self.callback.append = True
    if not isinstance(self.callback, keras.callbacks.BackupAndRestore):
      self._call('on_train_begin', logs)
    elif is_new:
      # All read it. In a job that goes on, the others have the newer state.
      self.callback.set_model(self.model)
      self.callback.on_train_begin(logs)
    self._is_training = True

  def on_epoch_begin(self, epoch, logs=None):
    """Calls the callback, on the chief."""
    self._epoch = epoch
    self._call('on_epoch_begin', epoch, logs)

  def on_train_batch_begin(self, batch, logs=None):
    """Calls the callback, on the chief, of a batch that is not done."""
    if not _keras_internal.is_skipped(self.model, batch):
      self._call('on_train_batch_begin', batch, logs)

  def on_train_batch_end(self, batch, logs=None):
    """Calls the callback, on the chief, of a batch that is not done."""
    if not _keras_internal.is_skipped(self.model, batch):
      self._call('on_train_batch_end', batch, logs)

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

    self._members.run_step('test', write, lambda: None, tf.constant([epoch]))

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
    >>> elastic_callbacks.unpack(packed, [other]), other.wait
    (True, 3)
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
) -> bool:
  """Gives callbacks, which are made like those that were packed, what they know.

  Returns whether they are made like those.
  """
  with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as arrays:
    meta = json.loads(arrays[_META].tobytes())
    callbacks = [_inner(callback) for callback in callbacks]
    classes = [about['class'] for about in meta]
    if classes != [type(callback).__name__ for callback in callbacks]:
      logging.warning(
        'The callbacks of this worker are others than %s, those of the worker '
        'that it continues with: they begin anew.',
        classes,
      )
      return False
    for i, (about, callback) in enumerate(zip(meta, callbacks, strict=True)):
      for name, found in about['attributes'].items():
        if 'arrays' not in found:
          value = _op(found['op']) if 'op' in found else found['value']
          setattr(callback, name, value)
          continue
        parts = [arrays[f'{i}/{name}/{j}'] for j in range(found['arrays'])]
        setattr(callback, name, parts if found['is_list'] else parts[0])
  return True


def _ignore(*_, **__) -> None:
  """Hears nothing."""


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
