"""kill -9 at each place of a save by several workers: the run goes on, bit by bit."""

import os
import signal

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import processes, tiers
from tests.fault_tolerance import killed_saves_program as program
from tests.fault_tolerance.killed_saves_program import Death
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer

_KEPT = 2
# Places at which a checkpoint has its name, or will have it.
_NAMED = ('after name', 'old', 'after gather')
# Of the chief, who writes; and of the other worker, without whom nothing is whole.
_ALL = (
  Death(0, 'name'),
  Death(0, 'after name'),
  Death(1, 'gather'),
  Death(1, 'after gather'),
  Death(0, 'old'),
  Death(0, 'restore'),
  Death(1, 'restore'),
)


class KilledSavesTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  @tiers.named_parameters(
    ('local_steps', 'local_steps', [Death(0, 'name')]),
    tiers.soak('sharded_everywhere', 'sharded', _ALL),
    tiers.soak('local_steps_everywhere', 'local_steps', _ALL),
  )
  def test_goes_on_with_the_same_bits(self, kind, deaths):
    whole = self.create_tempdir().full_path
    self.run_workers(kind, whole, keep=program.EPOCHS)
    expected = {
      found.metadata['epoch']: dict(found.arrays)
      for found in map(
        checkpointer.Checkpointer(whole).open,
        checkpointer.Checkpointer(whole).paths(),
      )
    }
    self.assertLen(expected, program.EPOCHS)
    self.assert_has_parts(kind, expected[program.EPOCHS])
    before = 0
    for death in deaths:
      self.run_workers(kind, self.directory, _KEPT, death)
      epoch = self.assert_whole(expected, death)
      # The saves before its death are whole, and that one if it has its name.
      saved = 0
      if death.place != 'restore':
        saved = death.save - (death.place not in _NAMED)
      self.assertEqual(epoch, before + saved, death)
      before = epoch
    began = self.run_workers(kind, self.directory, _KEPT)
    self.assertEqual(began, [before, before])
    self.assertEqual(self.assert_whole(expected), program.EPOCHS)
    # Beside the file that names the owner, and the one that tells the end.
    self.assertLen(os.listdir(self.directory), _KEPT + 2)

  def assert_has_parts(self, kind, arrays):
    """Checks that the checkpoint has the own values of each worker."""
    if kind == 'sharded':
      return
    own = [a for a in arrays.values() if a.ndim and a.shape[0] == 2]
    self.assertTrue(any((a[0] != a[1]).any() for a in own))

  def run_workers(self, kind, directory, keep, death=None):
    """Runs two workers; whoever is not to die fails because of who does."""
    arguments = kind, directory, keep, death
    with processes.Workers(program.train, 2, args=arguments) as workers:
      outcomes = workers.wait()
    if death is None:
      return [outcome.result() for outcome in outcomes]
    victim, other = outcomes[death.rank], outcomes[1 - death.rank]
    self.assertEqual(victim.exitcode, -signal.SIGKILL, victim.error_text)
    self.assertIsInstance(
      other.error, errors.WorkerUnavailableError, other.error_text
    )
    self.assertEqual(other.error.rank, death.rank)
    return []

  def assert_whole(self, expected, death=None):
    """Checks the newest checkpoint against an undisturbed run; returns its epoch."""
    store = checkpointer.Checkpointer(self.directory)
    found = store.newest()
    self.assertEqual(found.path, store.paths()[-1], death)
    epoch = found.metadata['epoch']
    self.assertEqual(set(found.arrays), set(expected[epoch]))
    for name, array in expected[epoch].items():
      np.testing.assert_array_equal(found.arrays[name], array, name)
    # At most one more, which is being written or deleted.
    self.assertLessEqual(len(store.paths()), _KEPT + 1)
    self.assertLessEqual(len(os.listdir(self.directory)), _KEPT + 3)
    return epoch


if __name__ == '__main__':
  tf.test.main()
