"""`MonitorCallback`: a Keras callback that measures a run."""

import os

import keras

from tf_strategies import option_checks
from tf_strategies.monitoring import training_monitor


@option_checks.has_options
class MonitorCallback(keras.callbacks.Callback):
  """Measures where the time of each step goes.

  Keras's progress bar shows `examples/s` of all workers, and `communication`, the
  share of the time in which collectives were in progress. Both are means of the epoch
  so far, if known. Later callbacks get them in the logs of batches; the history does
  not. With `timeline` every worker writes a timeline for Perfetto.

  Make one for each `fit`. Create it before data sets are distributed (`fit` itself
  distributes a plain data set); otherwise the time that a step waits for its
  batch is not measured. Time in callbacks belongs to no step.

  Steps are numbered by the optimizer's `iterations`. With `steps_per_execution`,
  a call of several steps is measured; with parameter servers, the time in which
  the chief schedules a step. It does not see communication inside the graph
  (strategies of one process, TensorFlow's collective runtime), and a GPU's step
  ends when Keras reads its logs. The profiler of Keras's TensorBoard
  callback shows both.

  Example:

    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('sgd', 'mse')
    >>> history = model.fit(keras.ops.ones([8, 3]), keras.ops.ones([8, 1]),
    ...                     batch_size=4, verbose=0, callbacks=[MonitorCallback()])

  Args:
    timeline: as in `tfs.monitoring.TrainingMonitor`.

  Raises:
    UnsupportedOptionError: `timeline` is no path of a local file.
  """

  def __init__(self, timeline: str | os.PathLike | None = None):
    super().__init__()
    self._monitor = training_monitor.TrainingMonitor(timeline)
    self._first = 0

  def on_train_begin(self, logs=None):
    """Starts the measurement."""
    optimizer = self.model.optimizer
    done = 0 if optimizer is None else int(optimizer.iterations.numpy())
    self._monitor.start(self.model.distribute_strategy, done)

  def on_epoch_begin(self, epoch, logs=None):
    """Starts the means that the progress bar shows."""
    self._monitor.begin_epoch()

  def on_train_batch_begin(self, batch, logs=None):
    """Starts a step, or a call of several steps."""
    self._first = batch
    self._monitor.begin_step()

  def on_train_batch_end(self, batch, logs=None):
    """Ends it."""
    self._monitor.end_step(batch - self._first + 1)
    # All callbacks get one dictionary, and Keras's own are the last. Logs of epochs
    # are left alone: the history is the same in every run.
    if logs is not None:
      logs.update(self._monitor.logs())

  def on_train_end(self, logs=None):
    """Writes the rest."""
    self._monitor.close()
