"""Trains on MNIST with Keras' `fit` and a strategy of tf_strategies.

Four logical CPUs and the digits that scikit-learn carries, offline:

  python -m examples.mnist_keras_fit --strategy=ring_mirrored \\
    --num_virtual_devices=4 --dataset=digits

MNIST on all GPUs, or on the CPU where there is none:

  python -m examples.mnist_keras_fit --strategy=ring_mirrored

Two workers with two logical CPUs each; with --elastic the others go on when one
of them dies:

  python -m tf_strategies.launch --num_workers=2 -- \\
    python -m examples.mnist_keras_fit --strategy=multi_worker_ring \\
    --num_virtual_devices=2 --dataset=digits

`--checkpoint_dir` makes a run go on where it was interrupted, with the same
result to the last bit: after the last epoch, or after SIGTERM, which ends it
with status 143, after the last step (`--max_restarts` of the launcher starts
it again). `--report_json` writes what the summary shows and more; `--log_dir`
and `--timeline` what each step's time goes to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import keras

import tf_strategies as tfs
from examples import (
  checkpointing,
  command_line,
  common_flags,
  mnist_common,
  mnist_model,
  training_report,
)
from tf_strategies.checkpoint.position import Position


def train(
  options: common_flags.TrainingOptions, devices: Sequence[str] | None = None
) -> dict[str, object]:
  """Trains as `options` say.

  Args:
    options: what and how.
    devices: names of the devices to use; None for all.

  Returns:
    The report of the run.

  Raises:
    UnsupportedOptionError: options that cannot give a right result.
    DataError: data that are missing or damaged.
    CheckpointMismatchError: `checkpoint_dir` holds another run's.
  """
  if options.elastic:
    return tfs.elastic.run(
      lambda job: _train(
        mnist_common.set_up(options, devices, job.strategy), job
      ),
      tfs.ElasticOptions(min_workers=options.min_workers),
      devices=devices,
    )
  return _train(mnist_common.set_up(options, devices))


def _train(setup, job=None) -> dict[str, object]:
  """Trains from the start, or from where a checkpoint or a job has come to."""
  data, strategy, epochs = setup.data, setup.strategy, setup.options.epochs
  model = build_compiled(setup)
  if job is not None:
    job.restore(model)
    outcome = run_fit(
      setup,
      model,
      None,
      job.epoch,
      lambda **arguments: job.fit(
        model,
        lambda epoch, step: data.train(strategy, epoch, epochs, step),
        epochs,
        data.steps_per_epoch,
        **arguments,
      ),
    )
  else:
    checkpoint, start = checkpointing.open_run(setup, model, model.optimizer)
    batches = data.train(strategy, start.epoch, epochs)
    outcome = fit_batches(setup, model, checkpoint, start, batches)
  if setup.options.save_weights:
    variables = checkpointing.state_variables(model, model.optimizer)
    training_report.write_weights(
      variables, setup.options.save_weights, strategy
    )
  return training_report.build('mnist_keras_fit', setup, model, outcome)


def fit_batches(
  setup: mnist_common.Setup,
  model: keras.Model,
  checkpoint: tfs.RunCheckpoint | None,
  start: Position,
  batches,
) -> training_report.Outcome:
  """Trains from `start` to the last epoch, and evaluates.

  Args:
    setup: of the run.
    model: compiled.
    checkpoint: where each epoch is saved, if it is.
    start: the epochs and steps that are done.
    batches: of all epochs from `start.epoch` on, distributed over the strategy.
  """
  if start.epoch >= setup.options.epochs:  # Every epoch had been done before.
    return run_fit(setup, model, checkpoint, start.epoch, lambda **_: None)
  return run_fit(
    setup,
    model,
    checkpoint,
    start.epoch,
    lambda **arguments: model.fit(
      batches,
      initial_epoch=start.epoch,
      epochs=setup.options.epochs,
      steps_per_epoch=setup.data.steps_per_epoch,
      **arguments,
    ),
    start.step,
  )


def run_fit(
  setup: mnist_common.Setup,
  model: keras.Model,
  checkpoint: tfs.RunCheckpoint | None,
  first_epoch: int,
  fit: Callable[..., keras.callbacks.History | None],
  first_step: int = 0,
) -> training_report.Outcome:
  """Trains by `fit`, given the arguments that all runs share, and evaluates.

  Args:
    setup: of the run.
    model: compiled.
    checkpoint: where each epoch is saved, if it is.
    first_epoch: epochs that are done.
    fit: called with arguments of `model.fit`.
    first_step: steps of the next epoch that are done.
  """
  start = Position(first_epoch, first_step)
  test_set = setup.data.test(setup.strategy)
  throughput = training_report.Throughput()
  history = fit(
    validation_data=test_set,
    validation_steps=setup.data.test_steps,
    callbacks=_callbacks(setup, throughput, checkpoint, start),
    shuffle=False,  # The stream of batches is shuffled.
    verbose=_verbosity(setup.options.verbose and setup.is_chief),
  )
  if history is not None and history.history:
    results = {name: values[-1] for name, values in history.history.items()}
  else:  # Nothing was left to train.
    evaluated = model.evaluate(
      test_set, steps=setup.data.test_steps, return_dict=True, verbose=0
    )
    results = {f'val_{name}': value for name, value in evaluated.items()}
  return training_report.Outcome(
    first_epoch=first_epoch,
    first_step=first_step,
    test=_split_results(results, 'val_'),
    train=_split_results(results, ''),
    throughput=throughput,
    variables=[
      *model.variables,
      *model.metrics_variables,
      *model.optimizer.variables,
    ],
  )


def _callbacks(setup, throughput, checkpoint, start):
  # Where a parameter server strategy saves, it goes on from there.
  callbacks = [
    _MeasureThroughput(throughput, setup, start),
    tfs.ResumeFit(setup.strategy),
  ]
  if setup.is_chief and training_report.can_log(setup.options.log_dir):
    callbacks.append(keras.callbacks.TensorBoard(setup.options.log_dir))
  if setup.monitor is not None:
    callbacks.append(tfs.MonitorCallback(setup.monitor))
  saver = checkpointing.saver(setup, checkpoint)
  if saver is not None:
    # The last one: all others have heard of the step after which it exits.
    callbacks.append(tfs.PreemptionCheckpoint(saver))
  return callbacks


def build_compiled(
  setup: mnist_common.Setup, steps_per_execution: int = 1
) -> keras.Model:
  """Returns the model, with its variables where the strategy wants them."""
  options = setup.options
  with setup.strategy.scope():
    model = mnist_model.build_model(
      options.model, setup.data.source.num_classes, options.dropout
    )
    model.compile(
      optimizer=mnist_model.build_optimizer(options, setup.num_replicas),
      loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
      # XLA would compile one replica's step, but not one that waits for
      # others: one device and several would run different kernels.
      jit_compile=False,
      steps_per_execution=steps_per_execution,
    )
    # There must be variables to restore before the first step.
    model.optimizer.build(model.trainable_variables)
  return model


class _MeasureThroughput(keras.callbacks.Callback):
  """Tells a `Throughput` when steps and epochs end."""

  def __init__(self, throughput, setup, start):
    super().__init__()
    self._throughput = throughput
    self._setup = setup
    self._start = start
    self._epoch = 0
    self._first = 0

  def on_epoch_begin(self, epoch, logs=None):
    self._epoch = epoch
    self._throughput.start_epoch()

  def on_train_batch_begin(self, batch, logs=None):
    self._first = batch

  def on_train_batch_end(self, batch, logs=None):
    data = self._setup.data
    end = self._first + self.model.steps_per_execution
    if (self._epoch, end) <= self._start:
      return  # It was done before.
    if end >= data.steps_per_epoch:
      self._setup.join()
    rows = [
      data.rows_in_step(step, self._epoch) for step in range(self._first, end)
    ]
    self._throughput.end_step(sum(rows))

  def on_epoch_end(self, epoch, logs=None):
    self._throughput.end_epoch()


def _verbosity(verbose: bool) -> int:
  """A progress bar on a terminal, a line an epoch in a file."""
  if not verbose:
    return 0
  return 1 if sys.stdout.isatty() else 2


def _split_results(results, prefix):
  """Loss and accuracy with `prefix`, or None where nothing was trained."""
  if f'{prefix}loss' not in results:
    return None
  return {
    name: float(results[f'{prefix}{name}']) for name in ('loss', 'accuracy')
  }


if __name__ == '__main__':
  command_line.run(train)
