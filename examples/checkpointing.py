"""Checkpoints from which a run goes on exactly: same weights at its end.

`tfs.RunCheckpoint` saves the model, the optimizer and where in the data the run
is (the order of examples follows from it, see `TrainingData.train`), and compares
the options that must be the same as before.

  checkpoint, position = open_run(setup, model, optimizer)
  batches = setup.data.train(strategy, position.epoch, epochs, position.step)
  ...
  checkpoint.save(epoch=1)
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

import tf_strategies as tfs
from examples import mnist_common, mnist_model
from tf_strategies.checkpoint import model_state
from tf_strategies.checkpoint.position import Position


def settings_of(setup: mnist_common.Setup) -> dict[str, object]:
  """What must be equal in two runs for one to go on from the other.

  Not the strategy: a run may go on with another number of replicas.
  """
  options, data = setup.options, setup.data
  rate = mnist_model.peak_learning_rate(options, setup.num_replicas)
  return {
    'dataset': data.source.name,
    'train_examples': data.source.train.num_examples,
    'model': options.model,
    'dropout': options.dropout,
    'global_batch_size': data.global_batch_size,
    'steps_per_epoch': data.steps_per_epoch,
    'full_batches': data.full_batches,
    'optimizer': options.optimizer,
    'learning_rate': rate,
    'warmup_steps': options.warmup_steps,
    'mixed_precision': options.mixed_precision,
    'seed': options.seed,
  }


def open_run(
  setup: mnist_common.Setup,
  model: keras.Model,
  optimizer: keras.optimizers.Optimizer,
  metrics: Sequence[keras.metrics.Metric] | None = None,
) -> tuple[tfs.RunCheckpoint | None, Position]:
  """Goes on from `checkpoint_dir`, if there is one in the options.

  Args:
    setup: of the run.
    model: built.
    optimizer: its optimizer.
    metrics: that belong to an epoch in progress; None for the model's.

  Returns:
    The checkpoint to save to, and where the run goes on.

  Raises:
    CheckpointMismatchError: as `RunCheckpoint.restore`.
  """
  directory = setup.options.checkpoint_dir
  if not directory:
    return None, Position()
  checkpoint = tfs.RunCheckpoint(
    directory, model, optimizer, settings_of(setup), metrics
  )
  return checkpoint, checkpoint.restore()


def saver(
  setup: mnist_common.Setup, checkpoint: tfs.RunCheckpoint | None
) -> tfs.RunCheckpoint | tfs.ParameterServerStrategy | None:
  """What saves the run when it is preempted; None without `checkpoint_dir`.

  A strategy with parameter servers saves by itself.
  """
  if checkpoint is None and setup.options.checkpoint_dir:
    return setup.strategy
  return checkpoint


def state_variables(
  model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, tf.Variable]:
  """The variables that decide how training goes on, by name."""
  variables = model_state.name_variables(model, optimizer)
  return {name: variable.value for name, variable in variables.items()}
