"""Parameter servers die while checkpoints are damaged, missing or unwritable."""

import pathlib

import numpy as np
import tensorflow as tf

from tests import parameter_servers, tiers
from tests.integration import parameter_server_case
from tests.integration import parameter_server_programs as programs
from tests.integration.parameter_server_case import damage
from tf_strategies import errors

_STEPS = parameter_server_case.STEPS
_CHECKPOINT_STEPS = 60
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class CheckpointsTest(parameter_server_case.FaultsTestCase):
  """Recovery uses an undamaged checkpoint, or a typed error ends the program."""

  @tiers.parameters(
    tiers.soak('arrays.bin', 'truncate', 1),
    ('arrays.bin', 'flip', 1),
    tiers.soak('arrays.bin', 'delete', 2),
    tiers.soak('manifest.json', 'empty', 2),
    tiers.soak('manifest.json', 'truncate', 1),
    tiers.soak('manifest.json', 'flip', 1),
  )
  def test_damaged_checkpoints_are_skipped(self, name, kind, count):
    """Checks that an older checkpoint is used and named, and no further step is
    lost.
    """
    with parameter_servers.Job() as job:
      before = self.damage_and_kill(job, name, kind, count)
      run = self.finish(job)
    logged = ' '.join(text for _, text in run.logged)
    *_, complete = before[:-count]
    for path in before[-count:]:
      self.assertIn(f'Skipped checkpoint {path}, which cannot be read', logged)
    self.assertIn(f'Using the older checkpoint {complete}.', logged)
    self.assertIn(f'restored {complete.name} after', logged)
    lost = programs.lost_steps(run)
    self.assertGreater(lost, count * _CHECKPOINT_STEPS)
    self.assertEqual(run.batches, _STEPS)
    self.assertEqual(run.iterations, _STEPS - lost)

  @tiers.parameters(
    tiers.soak('arrays.bin', 'truncate'),
    tiers.soak('manifest.json', 'empty'),
    tiers.soak('manifest.json', 'delete'),
  )
  def test_only_damaged_checkpoints_raise(self, name, kind):
    """Checks that the program ends with a typed error and deletes no file."""
    with parameter_servers.Job() as job:
      self.damage_and_kill(job, name, kind, 0)
      files, batches = self.files(), self.batches()
      outcome = job.wait()
    self.assertIsInstance(outcome.error, errors.DataError, outcome.error_text)
    self.assertIn('got none (', str(outcome.error))
    self.assertEqual(self.files(), files)
    # These steps had already begun with the old variables.
    self.assertLess(self.batches(), batches + 10)

  def damage_and_kill(self, job, name, kind, count):
    """Damages a file of the `count` newest checkpoints, or of all if 0.

    Kills a server.

    Returns the paths of all checkpoints.
    """
    job.start_chief(programs.train, self.arguments(saves=_CHECKPOINT_STEPS))
    # The chief must not write a checkpoint between the damage and the kill.
    self.inject_faults(job, (('at', 130), ('stop', 'chief', 0)))
    paths = self.kept()
    for path in paths[-count:]:
      damage(path / name, kind)
    self.inject_faults(
      job, (('kill', 'ps', 1), ('continue', 'chief', 0), ('start', 'ps', 1))
    )
    return paths

  @tiers.parameters(tiers.soak(False), tiers.soak(True))
  def test_restarted_finished_run_trains_no_step(self, reads):
    """Restarts a finished run twice."""
    options = {'checkpoint_dir': self.checkpoints, 'mode': 'sync'}
    arguments = self.progress, 1, reads, options
    with parameter_servers.Job() as job:
      first, *again = (job.run(programs.train, arguments) for _ in '123')
    self.assertGreater(first.report['steps'], 0)
    for run in again:
      self.assertEqual(run.report['steps'], 0)
      self.assertEqual(run.iterations, first.iterations)
      for a, b in zip(first.weights, run.weights, strict=True):
        np.testing.assert_array_equal(a, b)


if __name__ == '__main__':
  tf.test.main()
