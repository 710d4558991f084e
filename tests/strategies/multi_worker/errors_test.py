"""If workers disagree or end, all others raise typed errors."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from tests import processes, virtual_devices
from tf_strategies import process_group

virtual_devices.configure()

_DEADLINE_SECONDS = 240


def _strategy(devices=1, ring=None, is_sharded=False):
  """Returns a strategy with a short rendezvous timeout."""
  group = process_group.GroupOptions.from_env(rendezvous_timeout_seconds=90.0)
  return tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(group=group, **(ring or {})),
    devices=virtual_devices.names(devices),
    shard_optimizer_state=is_sharded,
  )


def _context():
  return tf.distribute.get_replica_context()


def _other_shape(strategy):
  x = tf.zeros([3 + strategy.rank])
  tf.function(strategy.run)(lambda: _context().all_reduce('SUM', x))


def _other_order(strategy):
  x = tf.range(3.0)

  def function():
    if strategy.rank == 0:
      return _context().all_reduce('SUM', x), _context().all_gather(x, 0)
    return _context().all_gather(x, 0), _context().all_reduce('SUM', x)

  tf.function(strategy.run)(function)


def _other_loop(strategy):
  """Calls one more all-reduce on one worker than on the other, then gathers."""

  @tf.function
  def steps():
    for _ in tf.range(2 + strategy.rank):
      strategy.run(lambda: _context().all_reduce('SUM', tf.range(3.0)))
    return strategy.run(lambda: _context().all_gather(tf.range(3.0), 0))

  steps()


def _fit(strategy, end):
  """Trains until `end(model)` is called on rank 1. Rank 0 would train much longer."""
  with strategy.scope():
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(1e-3), 'mse')
  x = np.arange(36, dtype=np.float32).reshape([12, 3]) / 36
  last = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, _: epoch == 5 and strategy.rank and end(model)
  )
  options = {'batch_size': 6, 'verbose': 0, 'callbacks': [last]}
  model.fit(x, x[:, :2], epochs=10**6, **options)


def _raise(model):
  raise ValueError('the disk of this callback is full')


def _stop(model):
  model.stop_training = True


_USES = {
  'shape': _other_shape,
  'order': _other_order,
  'loop': _other_loop,
  'callback': lambda strategy: _fit(strategy, _raise),
  'early': lambda strategy: _fit(strategy, _stop),
}
_SETUPS = {
  'devices': lambda rank: {'devices': 1 + rank},
  'bucket_bytes': lambda rank: {'ring': {'bucket_bytes': 1000 + rank}},
  'shard_optimizer_state': lambda rank: {'is_sharded': rank == 0},
  'tree': lambda rank: {'is_sharded': True, 'ring': {'all_reduce': 'tree'}},
}


def _attempt(options, use=lambda strategy: None):
  """Returns the error that making or using a strategy raises, or None."""
  try:
    with contextlib.closing(_strategy(**options)) as strategy:
      use(strategy)
  except Exception as e:
    return e
  return None


def _disagree(rank):
  """Runs every disagreement of two workers and returns their errors."""
  uses = {name: _attempt({}, use) for name, use in _USES.items()}
  return uses | {name: _attempt(make(rank)) for name, make in _SETUPS.items()}


class ErrorsTest(parameterized.TestCase):
  """Two workers that start once for all tests."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.results = processes.run_workers(
      _disagree, 2, deadline=_DEADLINE_SECONDS
    )

  @parameterized.parameters(
    ('shape', 'float32[3]', 'float32[4]'),
    ('order', 'all_reduce', 'all_gather'),
    ('loop', 'all_reduce', 'all_gather'),
    ('devices', 'devices of a worker', '1', '2'),
    ('bucket_bytes', 'bucket_bytes', '1000', '1001'),
    ('shard_optimizer_state', 'shard_optimizer_state'),
  )
  def test_mismatch_is_reported_on_all_workers(self, name, *parts):
    first, second = (result[name] for result in self.results)
    self.assertEqual(str(first), str(second))
    for error in (first, second):
      self.assertIsInstance(error, tfs.errors.CollectiveMismatchError)
      self.assertEqual(error.ranks, (1,))
    parts += (
      ('set-up of MultiWorkerRingStrategy',)
      if name in _SETUPS
      else ('rank 0 (task 0 at ',)
    )
    for part in parts:
      self.assertIn(part, str(first))

  @parameterized.parameters(('callback', ValueError), ('early', type(None)))
  def test_early_end_of_a_worker_is_reported(self, name, kind):
    mine, ended = (result[name] for result in self.results)
    self.assertIsInstance(mine, tfs.errors.WorkerUnavailableError)
    self.assertIsInstance(ended, kind)
    self.assertEqual(mine.rank, 1)
    self.assertIn('left the group', str(mine))

  def test_algorithm_without_sharded_state_is_refused(self):
    for result in self.results:
      self.assertIsInstance(result['tree'], tfs.errors.UnsupportedOptionError)
      self.assertIn("'tree'", str(result['tree']))


if __name__ == '__main__':
  absltest.main()
