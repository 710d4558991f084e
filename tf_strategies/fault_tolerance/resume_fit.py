"""`ResumeFit`: a `fit` that goes on where a killed coordinator was."""

from __future__ import annotations

import os

import keras
import tensorflow as tf
from absl import logging

from tf_strategies import _keras_internal
from tf_strategies.fault_tolerance import evaluator
from tf_strategies.strategies.parameter_server import resumption


class ResumeFit(keras.callbacks.Callback):
  """Restores the latest checkpoint when `fit` begins, and goes on from there.

  For `ParameterServerStrategy(checkpoint_dir=...)`, which writes a checkpoint
  every `checkpoint_steps` steps by itself. The run goes on in the epoch and at
  the batch of the checkpoint; steps after it are done again. When `fit` ends, a
  last checkpoint is written, and a file that tells a `SidecarEvaluator`.

  Without `checkpoint_dir` it does nothing.

  Example:

    with strategy.scope():
      model = build_model()
    model.fit(dataset, epochs=3, callbacks=[tfs.ResumeFit(strategy)])

  Args:
    strategy: a `ParameterServerStrategy`; on any other it does nothing.
  """

  def __init__(self, strategy: tf.distribute.Strategy):
    super().__init__()
    self._recovery = getattr(strategy, 'recovery', None)
    self._strategy = strategy
    if self._recovery is not None and not self._recovery.is_enabled:
      self._recovery = None

  def on_train_begin(self, logs=None):
    """Restores, and tells Keras and the data set where to go on."""
    if self._recovery is None:
      return
    _set_finished(self._strategy.options.checkpoint_dir, False)
    with self._strategy.scope():
      if not self.model.optimizer.built:
        self.model.optimizer.build(self.model.trainable_variables)
    position = self._recovery.restore(
      {'model': self.model, 'optimizer': self.model.optimizer}
    )
    if position is None:
      return
    epoch, steps = position['epoch'], position['epoch_steps']
    if steps == self.params.get('steps'):  # It was written at the very end.
      epoch, steps = epoch + 1, 0
    logging.info('fit goes on in epoch %d after %d steps', epoch + 1, steps)
    # As Keras's own BackupAndRestore does.
    _keras_internal.set_initial_epoch(self.model, epoch)
    self._recovery.resume(
      resumption.Resumption(
        epoch, steps, self.params.get('steps'), tuple(position['splits'])
      )
    )

  def on_epoch_begin(self, epoch, logs=None):
    """Notes which epoch it is."""
    if self._recovery is not None:
      self._recovery.begin_epoch(epoch)

  def on_epoch_end(self, epoch, logs=None):
    """A checkpoint from now on belongs to the next epoch."""
    if self._recovery is not None:
      self._recovery.begin_epoch(epoch + 1)

  def on_train_end(self, logs=None):
    """Writes the last checkpoint."""
    if self._recovery is not None:
      _keras_internal.set_initial_epoch(
        self.model, 0
      )  # Else the next `fit` begins there too.
      self._recovery.with_recovery(self._recovery.save)
      _set_finished(self._strategy.options.checkpoint_dir, True)


def _set_finished(directory: str, is_finished: bool) -> None:
  path = os.path.join(directory, evaluator.FINISHED_FILE)
  if is_finished:
    with tf.io.gfile.GFile(path, 'w') as f:
      f.write('Training is over.\n')
  elif tf.io.gfile.exists(path):
    tf.io.gfile.remove(path)
