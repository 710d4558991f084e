"""kill -9 at each point of a save by several workers: the run resumes exactly."""

import dataclasses
import os
import signal

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, tf_case, tiers
from tests.strategies.multi_worker import local_steps_workers as workers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, model_state
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
  """The rank to kill, and the point and number of the save."""

  rank: int
  point: str
  save: int = 2


def _die():
  os.kill(os.getpid(), signal.SIGKILL)


def _dies(point, at, function):
  """Returns `function`, but the process dies instead of the call or after it."""

  def call(*args, **options):
    if at == point:
      _die()
    result = function(*args, **options)
    if at == f'after {point}':
      _die()
    return result

  return call


def _arm(at):
  """Makes this process die at a point of the next save or load."""
  access = model_state.VariableAccess
  access.read = _dies('gather', at, access.read)
  access.share = _dies('restore', at, access.share)
  rename = os.rename
  renamed = []

  def rename_or_die(*args):
    renamed.append(args)
    # The new checkpoint is renamed first, then the old ones.
    name = 'name' if len(renamed) == 1 else 'old'
    _dies(name, at, rename)(*args)

  os.rename = rename_or_die


def train(rank, kind, directory, keep, death=None):
  """Trains from the newest checkpoint on. Returns the initial epoch."""
  job = JOBS[kind]
  sharded_state._SHORTEST = 4  # This model is small.
  strategy, model = workers.start(job, shard_optimizer_state=kind == 'sharded')
  is_victim = death is not None and death.rank == rank
  run = tfs.Run(directory, model, max_to_keep=keep)
  if is_victim and death.point == 'restore':
    _arm(death.point)
  began = run.restore().epoch
  saves = []

  class Arm(keras.callbacks.Callback):
    """Arms the fault before a save."""

    def on_epoch_end(self, epoch, logs=None):
      saves.append(epoch)
      if is_victim and len(saves) == death.save:
        _arm(death.point)

  model.fit(
    workers.dataset(job),
    initial_epoch=began,
    epochs=EPOCHS,
    callbacks=[Arm(), run],
    verbose=0,
  )
  strategy.close()
  return began


_KEPT = 2
# At these points the new checkpoint is complete, or will be.
_NAMED = ('after name', 'old', 'after gather')
# Rank 0 is the chief, which writes. Rank 1 holds a part of the values.
_ALL = (
  Death(0, 'name'),
  Death(0, 'after name'),
  Death(1, 'gather'),
  Death(1, 'after gather'),
  Death(0, 'old'),
  Death(0, 'restore'),
  Death(1, 'restore'),
)


class KilledSavesTest(tf_case.TestCase):
  @tiers.named_parameters(
    ('local_steps', 'local_steps', [Death(0, 'name')]),
    tiers.soak('sharded_everywhere', 'sharded', _ALL),
    tiers.soak('local_steps_everywhere', 'local_steps', _ALL),
  )
  def test_run_resumes_with_the_same_bits(self, kind, deaths):
    whole = self.create_tempdir().full_path
    self.run_workers(kind, whole, keep=EPOCHS)
    store = checkpointer.Checkpointer(whole)
    expected = {
      found.metadata['epoch']: dict(found.arrays)
      for found in map(store.open, store.paths())
    }
    self.assertLen(expected, EPOCHS)
    if (
      kind == 'local_steps'
    ):  # The checkpoint has separate values for each worker.
      arrays = expected[EPOCHS].values()
      own = [a for a in arrays if a.ndim and a.shape[0] == 2]
      self.assertTrue(any((a[0] != a[1]).any() for a in own))
    before = 0
    for death in deaths:
      self.run_workers(kind, self.directory, _KEPT, death)
      epoch = self.assert_newest_is_complete(expected, death)
      # The saves before the death are complete, and so is the last one once renamed.
      saved = 0
      if death.point != 'restore':
        saved = death.save - (death.point not in _NAMED)
      self.assertEqual(epoch, before + saved, death)
      before = epoch
    began = self.run_workers(kind, self.directory, _KEPT)
    self.assertEqual(began, [before, before])
    self.assertEqual(self.assert_newest_is_complete(expected), EPOCHS)
    # Two more files: one names the owner, and one marks the end.
    self.assertLen(os.listdir(self.directory), _KEPT + 2)

  def run_workers(self, kind, directory, keep, death=None):
    """Runs two workers. The survivor must fail because of the killed worker."""
    arguments = kind, directory, keep, death
    with processes.Workers(train, 2, args=arguments) as group:
      outcomes = group.wait()
    if death is None:
      return [outcome.result() for outcome in outcomes]
    victim, other = outcomes[death.rank], outcomes[1 - death.rank]
    self.assertEqual(victim.exitcode, -signal.SIGKILL, victim.error_text)
    self.assertIsInstance(
      other.error, errors.WorkerUnavailableError, other.error_text
    )
    self.assertEqual(other.error.rank, death.rank)
    return []

  def assert_newest_is_complete(self, expected, death=None):
    """Compares the newest checkpoint with an undisturbed run. Returns its epoch."""
    store = checkpointer.Checkpointer(self.directory)
    found = store.newest()
    self.assertEqual(found.path, store.paths()[-1], death)
    epoch = found.metadata['epoch']
    self.assertEqual(set(found.arrays), set(expected[epoch]))
    for name, array in expected[epoch].items():
      np.testing.assert_array_equal(found.arrays[name], array, name)
    # At most one more checkpoint, which is being written or deleted.
    self.assertLessEqual(len(store.paths()), _KEPT + 1)
    self.assertLessEqual(len(os.listdir(self.directory)), _KEPT + 3)
    return epoch


if __name__ == '__main__':
  tf.test.main()
