"""`MonitorCallback`: a Keras callback that measures a run."""

import keras

from tf_strategies import _keras_internal, option_checks
from tf_strategies.monitoring import training_monitor


@option_checks.has_options
class MonitorCallback(keras.callbacks.Callback):
  """Measures where the time of each step goes, and which rank stalls it.

  Every worker writes JSON lines with step time, examples per second, the shares
  of communication and input, bytes sent and memory; the same for TensorBoard if it
  is installed; and a timeline for Perfetto. The chief prints a line of progress at
  intervals.

  Keras's progress bar shows `examples/s`, of all workers, and `communication`, the
  share of the time in which collectives were in progress: means of the epoch so far,
  where they are known. They are in the logs of batches that callbacks after this one
  get, and not in the history.

  Use one for one `fit`. Create it before data sets are distributed (`fit` itself
  distributes a plain data set); otherwise the time that a step waits for its
  batch is not measured. Time in callbacks between two steps belongs to none.

  Steps are numbered by the optimizer's `iterations`. With `steps_per_execution`,
  a call of several steps is measured; with parameter servers, the time in which
  the chief schedules a step. Not visible are communication inside the graph
  (strategies of one process, TensorFlow's collective runtime) and GPUs, whose
  steps end when Keras reads their logs. `profile_steps` shows them.

  Example:

    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile('sgd', 'mse')
    >>> monitor = MonitorCallback(global_batch_size=4, progress_seconds=0)
    >>> history = model.fit(keras.ops.ones([8, 3]), keras.ops.ones([8, 1]),
    ...                     batch_size=4, verbose=0, callbacks=[monitor])

  Args:
    monitor: an existing `tfs.monitoring.TrainingMonitor`; None to create one.
    log_dir: this and all others: as of `tfs.monitoring.MonitorOptions`.

  Raises:
    UnsupportedOptionError: an option out of range, or beside a monitor.
  """

  def __init__(
    self,
    monitor: training_monitor.TrainingMonitor | None = None,
    *,
    log_dir: str | None = None,
    metrics_jsonl: str | None = None,
    timeline: str | None = None,
    profile_steps: tuple[int, int] | None = None,
    metrics_every_steps: int = 1,
    progress_seconds: float = 10.0,
    global_batch_size: int | None = None,
    timeline_events: int = 100_000,
  ):
    super().__init__()
    options = training_monitor.MonitorOptions(
      log_dir=log_dir,
      metrics_jsonl=metrics_jsonl,
      timeline=timeline,
      profile_steps=profile_steps,
      metrics_every_steps=metrics_every_steps,
      progress_seconds=progress_seconds,
      global_batch_size=global_batch_size,
      timeline_events=timeline_events,
    )
    if monitor is not None:
      option_checks.check_type(
        'monitor',
        monitor,
        training_monitor.TrainingMonitor,
        'a TrainingMonitor',
        "write options instead: MonitorCallback(log_dir='logs')",
      )
      option_checks.check(
        options == training_monitor.MonitorOptions(),
        f'MonitorCallback(monitor) beside {options}',
        'a monitor (which has its options) or options',
        'leave out one of them',
      )
    self._monitor = monitor or training_monitor.TrainingMonitor(options)
    self._first = 0

  def on_train_begin(self, logs=None):
    """Opens the files."""
    optimizer = self.model.optimizer
    done = 0 if optimizer is None else int(optimizer.iterations.numpy())
    self._monitor.start(self.model.distribute_strategy, done)

  def on_epoch_begin(self, epoch, logs=None):
    """Starts the means that the progress bar shows."""
    self._monitor.begin_epoch()

  def on_train_batch_begin(self, batch, logs=None):
    """Starts a step, or a call of several steps."""
    self._first = batch
    if not _keras_internal.is_skipped(self.model, batch):
      self._monitor.begin_step()

  def on_train_batch_end(self, batch, logs=None):
    """Ends it."""
    if not _keras_internal.is_skipped(self.model, self._first):
      self._monitor.end_step(batch - self._first + 1)
    # All callbacks get one dictionary, and Keras's own are the last. Logs of epochs
    # are left alone: the history is the same in every run.
    if logs is not None:
      logs.update(self._monitor.epoch_logs())

  def on_train_end(self, logs=None):
    """Writes the rest."""
    self._monitor.close()
