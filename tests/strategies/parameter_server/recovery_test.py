"""Recovery restores complete checkpoints of variables, or raises a typed error."""

import os
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import fakes, local_servers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer
from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.parameter_server import (
  options,
  recovery,
  table_files,
)


class RecoveryTest(local_servers.LocalServersTestCase):
  def setUp(self):
    super().setUp()
    self.pool, self.liveness = fakes.pool(self, 1)
    self.registry = weakref.WeakValueDictionary()
    self.restored = []

  def make(self, has_checkpoints=True):
    directory = self.directory if has_checkpoints else None
    found = recovery.Recovery(
      options.ParameterServerOptions('async', checkpoint_dir=directory),
      self.liveness,
      self.pool,
      self.registry,
    )
    found.on_restored = lambda: self.restored.append(True)
    return found

  def take_steps(self, found, count):
    for _ in range(count):
      found.note_begun(None)

  def variable(self, value, **options):
    made = local_servers.variable(0, value, **options)
    self.registry[id(made)] = made
    return made

  def die_once(self, *lost):
    """Returns an action. In its first call a server dies with these variables."""
    is_over = []

    def action():
      if is_over:
        return [v.numpy().tolist() for v in lost]
      is_over.append(True)
      for variable in lost:
        variable.is_alive = lambda: False
      raise tf.errors.UnavailableError(None, None, 'the server is gone')

    self.liveness.dead_servers = {0}
    return action

  def save_twice(self, found, weight):
    """Saves [1, 2] after 10 steps and [3, 4] after 20. Returns the paths."""
    found.track({'weight': weight})
    self.take_steps(found, 10)
    paths = [found.write()]
    weight.assign([3.0, 4.0])
    self.take_steps(found, 10)
    return [*paths, found.write()]

  def damage(self, path):
    with open(os.path.join(path, 'arrays.bin'), 'r+b') as f:
      f.seek(-1, os.SEEK_END)
      self.removed = f.read()
      f.seek(-1, os.SEEK_END)
      f.truncate()

  @pytest.mark.smoke
  def test_newest_checkpoint_is_restored(self):
    weight, found = self.variable([1.0, 2.0]), self.make()
    self.save_twice(found, weight)
    self.take_steps(found, 3)
    weight.assign([5.0, 6.0])
    self.assertEqual(found.with_recovery(self.die_once(weight)), [[3.0, 4.0]])
    self.assertLen(self.restored, 1)
    self.assertEqual(found.history[0]['lost_steps'], 3)
    self.assertFalse(weight.is_lost)
    # A disconnected server lost nothing, but its state is of another step.
    del weight.is_alive
    self.take_steps(found, 2)
    weight.assign([7.0, 8.0])
    found.with_recovery(self.die_once())
    self.assertAllEqual(weight, [3.0, 4.0])
    self.assertEqual(found.history[1]['lost_steps'], 2)

  def test_no_step_runs_without_a_complete_checkpoint(self):
    """Checks that no checkpoint is written either until one was restored."""
    weight, found = self.variable([1.0, 2.0]), self.make()
    paths = self.save_twice(found, weight)
    for path in paths:
      self.damage(path)
    calls = []
    with self.assertRaisesRegex(errors.DataError, 'damaged'):
      found.with_recovery(self.die_once(weight))
    for use in (
      lambda: found.with_recovery(lambda: calls.append(True)),
      lambda: self.pool.submit(mock.Mock()),
      found.write,
    ):
      with self.assertRaisesRegex(errors.DataError, 'damaged'):
        use()
    self.assertEqual((calls, found.history), ([], []))
    with open(os.path.join(paths[1], 'arrays.bin'), 'ab') as f:
      f.write(self.removed)
    found.with_recovery(lambda: calls.append(weight.numpy().tolist()))
    self.assertEqual(calls, [[3.0, 4.0]])
    self.pool.submit(mock.Mock())
    self.pool.wait()
    self.assertTrue(found.write())

  def test_server_death_before_the_first_checkpoint_raises(self):
    """Checks that the checkpoint of another run is not used."""
    self.save_twice(self.make(), self.variable([1.0, 2.0]))
    weight, found = self.variable([5.0, 6.0]), self.make()
    self.assertTrue(found.track({'weight': weight}))
    with self.assertRaisesRegex(
      errors.ParameterServerUnavailableError,
      r'ps 0 at ps-0:1 died before this run had written a checkpoint.*Fix: restart',
    ):
      found.with_recovery(self.die_once(weight))

  def test_checkpoint_of_another_run_does_not_replace_a_damaged_one(self):
    self.save_twice(self.make(), self.variable([1.0, 2.0]))
    weight, found = self.variable([5.0, 6.0]), self.make()
    found.track({'weight': weight})
    self.damage(found.write())
    with self.assertRaisesRegex(errors.DataError, 'damaged'):
      found.with_recovery(self.die_once(weight))

  def test_lost_variable_without_checkpoint(self):
    """Checks that it must be assigned before a read, and that metrics are reset."""
    on_read = tf.VariableSynchronization.ON_READ
    weight, found = self.variable([1.0]), self.make()
    metric = self.variable([7.0], synchronization=on_read)
    other = self.variable([7.0])
    found.track({'weight': weight})
    found.write()
    die = self.die_once(weight, metric, other)
    with (
      self.assertLogs('absl', 'WARNING') as logs,
      self.assertRaisesRegex(errors.DataError, 'was lost with .*track'),
    ):
      found.with_recovery(die)
    self.assertRegex(' '.join(logs.output), 'count from zero.*must be assigned')
    self.assertAllEqual(metric, [0.0])

    @tf.function
    def step():
      return other + 1.0

    for use in (step, other.numpy, lambda: other.assign_add([1.0])):
      with self.assertRaisesRegex(errors.DataError, 'was lost with .*track'):
        use()
    other.assign([3.0])
    self.assertAllEqual(step(), [4.0])

  def test_interrupted_restore_is_repeated_for_all_variables(self):
    """Checks variables that seem to be restored already."""
    weights = {name: self.variable([1.0]) for name in 'ab'}
    found = self.make()
    found.track(weights)
    found.write()
    attempts = []

    real = table_files.restore

    def restore(*arguments):
      attempts.append(True)
      if len(attempts) == 1:
        # Only a part is restored when another server dies.
        weights['a'].assign([7.0])
        del weights['a'].is_alive
        raise tf.errors.UnavailableError(None, None, 'another server is gone')
      real(*arguments)

    with mock.patch.object(table_files, 'restore', restore):
      found.with_recovery(self.die_once(weights['a']))
    self.assertLen(attempts, 2)
    self.assertEqual([v.numpy() for v in weights.values()], [[1.0], [1.0]])

  @parameterized.parameters(
    ('weight', [0.0, 0.0, 0.0], 'shape'),
    ('weight', [0, 0], 'int32'),
    ('bias', [0.0, 0.0], 'lacks variable bias'),
  )
  def test_checkpoint_of_another_model_is_refused(self, name, value, message):
    self.save_twice(self.make(), self.variable([1.0, 2.0]))
    other = self.variable(value)
    with self.assertRaisesRegex(errors.CheckpointMismatchError, message):
      self.make().restore({name: other})
    self.assertAllEqual(other, np.zeros_like(value))

  def test_checkpoint_of_another_strategy_is_refused(self):
    weight = self.variable([1.0, 2.0])
    checkpointer.Checkpointer(self.directory).save(
      [('weight', np.array([3.0, 4.0], np.float32))],
      {**Position(1).to_json(), 'settings': {}, 'parts': {}},
    )
    with self.assertRaisesRegex(
      errors.CheckpointMismatchError, 'Expected a checkpoint of a Param.*Fix'
    ):
      self.make().restore({'weight': weight})
    self.assertAllEqual(weight, [1.0, 2.0])

  def test_server_death_without_checkpoints_raises(self):
    found = self.make(has_checkpoints=False)
    self.assertFalse(found.track({'weight': self.variable([1.0])}))
    self.assertIsNone(found.write())
    with self.assertRaises(errors.ParameterServerUnavailableError):
      found.with_recovery(self.die_once())


if __name__ == '__main__':
  tf.test.main()
