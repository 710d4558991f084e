"""Recovery restores whole checkpoints of variables, or raises a typed error."""

import os
import weakref
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import fakes, local_servers
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer
from tf_strategies.checkpoint.position import Position
from tf_strategies.strategies.parameter_server import options, recovery


class RecoveryTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(local_servers.on_local_devices())
    self.directory = self.create_tempdir().full_path
    self.pool, self.liveness = fakes.pool(self, 1)
    self.registry = weakref.WeakValueDictionary()

  def make(self):
    return recovery.Recovery(
      options.ParameterServerOptions(checkpoint_dir=self.directory),
      self.liveness,
      self.pool,
      self.registry,
    )

  def take_steps(self, found, count):
    for _ in range(count):
      found.note_begun(None)

  def variable(self, value, **options):
    made = local_servers.variable(0, value, **options)
    self.registry[id(made)] = made
    return made

  def die_once(self, *lost):
    """An action during which a server dies, with these variables."""
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
    """Checkpoints of [1, 2] after 10 steps, and of [3, 4] after 20."""
    found.track({'weight': weight})
    self.take_steps(found, 10)
    paths = [found.write()]
    weight.assign([3.0, 4.0])
    self.take_steps(found, 10)
    return [*paths, found.write()]

  def damage(self, path):
    file = os.path.join(path, 'arrays.bin')
    with open(file, 'r+b') as f:
      f.seek(-1, os.SEEK_END)
      self.cut = f.read()
      f.seek(-1, os.SEEK_END)
      f.truncate()

  def test_no_step_runs_without_a_whole_checkpoint(self):
    """Nor is one written, until a whole one was read."""
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
      f.write(self.cut)
    found.with_recovery(lambda: calls.append(weight.numpy().tolist()))
    self.assertEqual(calls, [[3.0, 4.0]])
    self.pool.submit(mock.Mock())
    self.pool.wait()
    self.assertTrue(found.write())

  @parameterized.parameters(False, True)
  def test_checkpoint_of_another_run_does_not_count(self, is_saved):
    self.save_twice(self.make(), self.variable([1.0, 2.0]))
    weight, found = self.variable([5.0, 6.0]), self.make()
    self.assertTrue(found.track({'weight': weight}))
    error = errors.ParameterServerUnavailableError
    message = 'ps 0 at ps-0:1 died before this run had written a checkpoint.*Fix: restart'
    if is_saved:
      self.damage(found.write())
      error, message = errors.DataError, 'damaged'
    with self.assertRaisesRegex(error, message):
      found.with_recovery(self.die_once(weight))

  def test_lost_variable_that_is_in_no_checkpoint(self):
    """Checks that it must be assigned before a read; a metric counts from zero."""
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

  @parameterized.parameters(
    ('weight', [0.0, 0.0, 0.0], 'shape'),
    ('weight', [0, 0], 'int32'),
    ('bias', [0.0, 0.0], 'lacks variable bias'),
    ('weight', [0.0, 0.0], 'Expected a checkpoint of a Param.*Fix'),
  )
  def test_checkpoint_of_another_model_or_strategy(self, name, value, message):
    self.save_twice(self.make(), self.variable([1.0, 2.0]))
    if 'Param' in message:
      checkpointer.Checkpointer(self.directory).save(
        [('weight', np.array([3.0, 4.0], np.float32))],
        {**Position(1).to_json(), 'settings': {}, 'parts': {}},
      )
    other = self.variable(value)
    with self.assertRaisesRegex(errors.CheckpointMismatchError, message):
      self.make().restore({name: other})
    self.assertAllEqual(other, np.zeros_like(value))


if __name__ == '__main__':
  tf.test.main()
