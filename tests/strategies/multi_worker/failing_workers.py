"""The workers of errors_test.py, which fail in one way after another.

One process runs many jobs, because importing TensorFlow takes longer than a
job.
"""

import contextlib
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices
from tf_strategies import process_group

virtual_devices.configure()


def make_strategy(devices=1, ring=None, is_sharded=False, **group_options):
  """Returns a strategy whose workers wait for each other, but not for long."""
  settings = {'rendezvous_timeout_seconds': 90.0, **group_options}
  return tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(
      group=process_group.GroupOptions.from_env(**settings), **(ring or {})
    ),
    devices=virtual_devices.names(devices),
    shard_optimizer_state=is_sharded,
  )


def told(error):
  """Returns the contents of an error as JSON values."""
  return {
    'kind': type(error).__name__,
    'message': str(error),
    'rank': getattr(error, 'rank', None),
    'ranks': list(getattr(error, 'ranks', ())),
  }


def _context():
  return tf.distribute.get_replica_context()


def _run(strategy, function):
  """Runs `function(context)` as a step inside a tf.function."""
  tf.function(lambda: strategy.run(lambda: function(_context())))()


def _other_shape(strategy):
  _run(strategy, lambda c: c.all_reduce('SUM', tf.zeros([3 + strategy.rank])))


def _other_order(strategy):
  x = tf.range(3.0)

  def function(context):
    if strategy.rank == 0:
      return context.all_reduce('SUM', x), context.all_gather(x, 0)
    return context.all_gather(x, 0), context.all_reduce('SUM', x)

  _run(strategy, function)


def _other_loop(strategy):
  """Calls one more all-reduce on one worker than on the other, then gathers."""

  @tf.function
  def steps():
    for _ in tf.range(2 + strategy.rank):
      strategy.run(lambda: _context().all_reduce('SUM', tf.range(3.0)))
    return strategy.run(lambda: _context().all_gather(tf.range(3.0), 0))

  steps()


COLLECTIVES = {
  'shape': _other_shape,
  'order': _other_order,
  'loop': _other_loop,
}


def _raise(model):
  raise ValueError('the disk of this callback is full')


def _stop(model):
  model.stop_training = True


# What a callback of rank 1 does, while rank 0 would train much longer.
ENDS = {'callback': _raise, 'early': _stop}


def _fit(strategy, end):
  with strategy.scope():
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(1e-3), 'mse')
  x = np.arange(36, dtype=np.float32).reshape([12, 3]) / 36
  last = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, _: epoch == 5 and strategy.rank and end(model)
  )
  options = {'batch_size': 6, 'verbose': 0, 'callbacks': [last]}
  model.fit(x, x[:, :2], epochs=10**6, **options)


SETUPS = {
  'devices': lambda rank: {'devices': 1 + rank},
  'bucket_bytes': lambda rank: {'ring': {'bucket_bytes': 1000 + rank}},
  'shard_optimizer_state': lambda rank: {'is_sharded': rank == 0},
  'tree': lambda rank: {'is_sharded': True, 'ring': {'all_reduce': 'tree'}},
}


@contextlib.contextmanager
def _environment(**variables):
  before = dict(os.environ)
  os.environ.update(variables)
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)


def _attempt(make, use=lambda strategy: None):
  """Returns the error that making or using a strategy raises."""
  started = time.monotonic()
  try:
    strategy = make()
  except tfs.errors.Error as e:
    return {**told(e), 'seconds': time.monotonic() - started}
  try:
    use(strategy)
  except Exception as e:
    return told(e)
  finally:
    strategy.close()
  return {'kind': 'nothing went wrong'}


def disagree(rank, other_addresses):
  """Runs every disagreement of two workers and returns their errors."""
  results = {
    name: _attempt(make_strategy, use) for name, use in COLLECTIVES.items()
  }
  for name, end in ENDS.items():
    results[name] = _attempt(make_strategy, lambda s, end=end: _fit(s, end))
  for name, options in SETUPS.items():
    results[name] = _attempt(lambda o=options: make_strategy(**o(rank)))
  # Disagreements before the workers connect have their own deadline and ports.
  short = {'rendezvous_timeout_seconds': 6.0}

  def with_addresses(addresses, **options):
    config = processes.tf_config({'worker': addresses}, rank)
    with _environment(TF_CONFIG=config):
      return _attempt(lambda: make_strategy(**short, **options))

  # Each has its own ports, because a worker may still use the previous ones.
  a, b, absent, f, g, h, i = other_addresses
  results['world_size'] = with_addresses([a, b] if rank else [a, b, absent])
  results['one_address'] = with_addresses([f, f])
  results['missing'] = with_addresses([g, h, absent])
  secret = f'another secret of rank {rank}'.encode()
  results['secret'] = with_addresses([i, b], secret=secret)
  return results
