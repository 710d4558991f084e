"""Checkpoints from which a run goes on exactly: same weights at its end.

That takes the model's and the optimizer's variables, the number of epochs done
(the order of examples follows from it, see `TrainingData.train`), and options
that are the same as before. All of it is saved, and compared on restoring.

  checkpoint = RunCheckpoint(directory, model, optimizer, settings)
  first_epoch = checkpoint.restore()
  ...
  checkpoint.save(epochs_done=1)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import keras
import tensorflow as tf

import tf_strategies as tfs
from examples import mnist_common, mnist_model

_SETTINGS_FILE = 'settings.json'
# How tf.train.Checkpoint spells the key of a variable in a dict: slashes inside
# it are escaped.
_KEY = 'variables/{}/.ATTRIBUTES/VARIABLE_VALUE'
_SLASH = '.S'


class RunCheckpoint:
  """The state of a run after each epoch, in one directory.

  A run that is killed while it saves leaves the previous checkpoint intact:
  TensorFlow names the new one only when all of it is written.

  Args:
    directory: where; made if it is missing.
    model: a built model.
    optimizer: its optimizer, built as well.
    settings: whatever makes two runs different, such as the seed. A run with
      other settings may not go on from this directory.
  """

  def __init__(
    self,
    directory: str,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    settings: Mapping[str, object],
  ):
    self._directory = directory
    # As JSON returns it, so that what was written compares equal.
    self._settings = json.loads(json.dumps(settings))
    self._variables = state_variables(model, optimizer)
    self._epochs_done = tf.Variable(0, dtype=tf.int64, trainable=False)
    self._checkpoint = tf.train.Checkpoint(
      variables=self._variables, epochs_done=self._epochs_done
    )
    self._manager = tf.train.CheckpointManager(
      self._checkpoint, directory, max_to_keep=2
    )

  def restore(self) -> int:
    """Restores the last epoch that was saved, if any.

    Returns:
      The number of epochs that are done: 0 in an empty directory.

    Raises:
      CheckpointMismatchError: it is another model's or another run's; the
        message names every difference.
    """
    path = self._manager.latest_checkpoint
    if path is None:
      return 0
    differences = self._different_settings() + self._different_variables(path)
    if differences:
      raise tfs.errors.CheckpointMismatchError(
        f'{path} is not a checkpoint of this run: {"; ".join(differences)}. '
        'Pass the options that it was made with, or another checkpoint_dir.'
      )
    self._checkpoint.restore(path).assert_consumed()
    return int(self._epochs_done.numpy())

  def save(self, epochs_done: int) -> None:
    """Saves the state after `epochs_done` epochs."""
    self._write_settings()
    self._epochs_done.assign(epochs_done)
    self._manager.save(checkpoint_number=epochs_done)

  def _write_settings(self) -> None:
    path = os.path.join(self._directory, _SETTINGS_FILE)
    os.makedirs(self._directory, exist_ok=True)
    with open(f'{path}.new', 'w', encoding='utf-8') as f:
      json.dump(self._settings, f, indent=2, sort_keys=True)
    os.replace(f'{path}.new', path)

  def _different_settings(self) -> list[str]:
    path = os.path.join(self._directory, _SETTINGS_FILE)
    try:
      with open(path, encoding='utf-8') as f:
        saved = json.load(f)
    except (OSError, ValueError) as e:
      return [f'its {_SETTINGS_FILE} cannot be read ({e})']
    return [
      f'{name} was {saved.get(name)!r} and is {self._settings.get(name)!r}'
      for name in sorted({*saved, *self._settings})
      if saved.get(name) != self._settings.get(name)
    ]

  def _different_variables(self, path: str) -> list[str]:
    try:
      shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (tf.errors.OpError, ValueError) as e:
      return [f'it cannot be read ({e})']
    wanted = {
      _KEY.format(name.replace('/', _SLASH)): (name, list(variable.shape))
      for name, variable in self._variables.items()
    }
    found = []
    for key, (name, shape) in wanted.items():
      if key not in shapes:
        found.append(f'it lacks variable {name}')
      elif shapes[key] != shape:
        found.append(
          f'variable {name} has shape {shapes[key]} there and {shape} here'
        )
    prefix, _, suffix = _KEY.partition('{}')
    for key in sorted(set(shapes) - set(wanted)):
      if key.startswith(prefix) and key.endswith(suffix):
        name = key[len(prefix) : -len(suffix)].replace(_SLASH, '/')
        found.append(f'variable {name} is not in this run')
    return found


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
) -> tuple[RunCheckpoint | None, int]:
  """Goes on from `checkpoint_dir`, if there is one in the options.

  Returns:
    The checkpoint to save to, and the number of epochs that are done.

  Raises:
    CheckpointMismatchError: as `RunCheckpoint.restore`.
  """
  directory = setup.options.checkpoint_dir
  if not directory:
    return None, 0
  checkpoint = RunCheckpoint(directory, model, optimizer, settings_of(setup))
  return checkpoint, checkpoint.restore()


def state_variables(
  model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> dict[str, tf.Variable]:
  """The variables that decide how training goes on, by name.

  Weights, the state of random layers and the optimizer's variables; not the
  metrics, which start anew in each epoch.
  """
  state = {f'model/{v.path}': v.value for v in model.weights}
  state |= {f'optimizer/{v.path}': v.value for v in optimizer.variables}
  others = {id(v) for v in [*model.weights, *model.metrics_variables]}
  random = [v for v in model.variables if id(v) not in others]
  # Keras numbers seed generators through a process: their place in the model
  # is a name that lasts.
  return state | {f'model/random/{i}': v.value for i, v in enumerate(random)}
