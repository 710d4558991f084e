"""A worker that saves after each epoch, and may kill itself at a place of a save."""

import dataclasses
import os
import signal

import keras

import tf_strategies as tfs
from tests import virtual_devices
from tests.strategies.multi_worker import local_steps_workers as workers
from tf_strategies.checkpoint import model_state
from tf_strategies.strategies.mirrored import sharded_state

EPOCHS = 14
_ADAM = ('Adam', {'learning_rate': 0.01})
_NESTEROV = ('SGD', {'learning_rate': 0.7, 'momentum': 0.9, 'nesterov': True})
JOBS = {
  'sharded': workers.Job(0, inner=_ADAM),
  'local_steps': workers.Job(3, inner=_ADAM, outer=_NESTEROV),
}


@dataclasses.dataclass(frozen=True)
class Death:
  """Of whom, where, and in which save of its life."""

  rank: int
  place: str
  save: int = 2


def _die():
  os.kill(os.getpid(), signal.SIGKILL)


def _dies(place, at, function):
  """A function in whose place a process dies, or after which it dies."""

  def call(*args, **options):
    if at == place:
      _die()
    result = function(*args, **options)
    if at == f'after {place}':
      _die()
    return result

  return call


def _arm(at):
  """Makes this process die at a place of the save, or the load, that comes."""
  access = model_state.VariableAccess
  access.read = _dies('gather', at, access.read)
  access.restore = _dies('restore', at, access.restore)
  rename = os.rename
  renamed = []

  def rename_or_die(*args):
    renamed.append(args)
    # First the new one gets its name; then those that are too old lose theirs.
    name = 'name' if len(renamed) == 1 else 'old'
    _dies(name, at, rename)(*args)

  os.rename = rename_or_die


def train(rank, kind, directory, keep, death=None):
  """Trains from the newest checkpoint on; returns at which epoch it began."""
  job = JOBS[kind]
  if kind == 'sharded':
    sharded_state._SHORTEST = 4  # This model is small.
    strategy = tfs.create_strategy(
      job.strategy,
      devices=virtual_devices.names(1),
      shard_optimizer_state=True,
    )
  else:
    strategy = workers.strategy_of(job)
  with strategy.scope():
    model = workers.model_of(job, lambda: workers.local_steps(job))
  is_victim = death is not None and death.rank == rank
  run = tfs.Run(directory, model, max_to_keep=keep)
  if is_victim and death.place == 'restore':
    _arm(death.place)
  began = run.restore().epoch
  saves = []

  class Arm(keras.callbacks.Callback):
    """Before a save."""

    def on_epoch_end(self, epoch, logs=None):
      saves.append(epoch)
      if is_victim and len(saves) == death.save:
        _arm(death.place)

  model.fit(
    workers.dataset(job),
    initial_epoch=began,
    epochs=EPOCHS,
    callbacks=[Arm(), run],
    verbose=0,
  )
  strategy.close()
  return began
