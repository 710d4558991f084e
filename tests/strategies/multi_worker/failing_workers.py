"""The workers of errors_test.py, which fail in one way after another.

One process runs many jobs, because importing TensorFlow takes longer than a
job. A worker that is killed restarts and joins the next job.
"""

import contextlib
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices
from tf_strategies import process_group

virtual_devices.configure()

_DEADLINE_SECONDS = 90.0


def make_strategy(devices=1, bucket_bytes=8 << 20, **group_options):
  """Returns a strategy whose workers wait for each other, but not for long."""
  settings = {'rendezvous_timeout_seconds': 90.0, **group_options}
  return tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(
      bucket_bytes=bucket_bytes,
      group=process_group.GroupOptions.from_env(**settings),
    ),
    devices=virtual_devices.names(devices),
  )


def told(error):
  """Returns the contents of an error as JSON values."""
  return {
    'kind': type(error).__name__,
    'message': str(error),
    'rank': getattr(error, 'rank', None),
    'address': getattr(error, 'address', None),
    'ranks': list(getattr(error, 'ranks', ())),
    'at': time.time(),
  }


# Disagreements: all of them use one start of the workers.


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

SETUPS = {
  'devices': lambda rank: {'devices': 1 + rank},
  'bucket_bytes': lambda rank: {'bucket_bytes': 1000 + rank},
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
  except tfs.errors.Error as e:
    return told(e)
  finally:
    strategy.close()
  return {'kind': 'nothing went wrong'}


def disagree(rank, other_addresses):
  """Runs every disagreement of two workers and returns their errors."""
  results = {
    name: _attempt(make_strategy, use) for name, use in COLLECTIVES.items()
  }
  for name, options in SETUPS.items():
    results[name] = _attempt(lambda o=options: make_strategy(**o(rank)))
  # Disagreements before the workers connect have their own deadline and ports.
  short = {'rendezvous_timeout_seconds': 6.0}

  def with_addresses(addresses, index=rank, **options):
    config = processes.tf_config({'worker': addresses}, index)
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


# Losses: workers train until one of them dies.


class Losses:
  """The jobs of one directory, in which workers leave notes.

  Args:
    directory: directory of the notes.
    rank: rank of this worker.
  """

  def __init__(self, directory, rank):
    self._directory = directory
    self._rank = rank

  def path(self, job, rank, note):
    return os.path.join(self._directory, f'{job}.{rank}.{note}')

  def note(self, job, note, value=None):
    path = self.path(job, self._rank, note)
    with open(path + '.part', 'w') as f:
      json.dump(value, f)
    os.replace(path + '.part', path)

  def read(self, job, rank, note, seconds=_DEADLINE_SECONDS):
    """Waits for a worker's note and returns its contents."""
    path = self.path(job, rank, note)
    end = time.monotonic() + seconds
    while not os.path.exists(path):
      if time.monotonic() > end:
        raise AssertionError(f'{path} did not appear')
      time.sleep(0.01)
    with open(path) as f:
      return json.load(f)


class Note(keras.callbacks.Callback):
  """Reports that training runs. On the victim, then causes the failure."""

  def __init__(self, losses, job, then):
    super().__init__()
    self._losses = losses
    self._job = job
    self._then = then
    self._batches = 0

  def on_train_batch_end(self, batch, logs=None):
    self._batches += 1
    if self._batches == 5:
      self._losses.note(self._job, 'runs')
    if self._batches == 10 and self._then is not None:
      self._then(self.model)


def _raise(model):
  raise ValueError('the disk of this callback is full')


def _stop(model):
  model.stop_training = True


# (name, victim, what the victim does itself, options of the group)
JOBS = (
  ('kill_0', 0, None, {}),
  ('kill_1', 1, None, {}),
  ('stop', 1, None, {'heartbeat_timeout_seconds': 4.0}),
  ('callback', 0, _raise, {}),
  ('early', 2, _stop, {}),
)


def _fit(strategy, callback):
  with strategy.scope():
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(1e-3), 'mse')
  x = np.arange(36, dtype=np.float32).reshape([12, 3]) / 36
  model.fit(
    x, x[:, :2], batch_size=6, epochs=10**6, verbose=0, callbacks=[callback]
  )


def lose(rank, directory):
  """Trains in each job until it has lost a worker."""
  losses = Losses(directory, rank)
  for name, victim, act, options in JOBS:
    # A worker that was killed continues with the next job.
    if os.path.exists(losses.path(name, victim, 'gone')):
      continue
    strategy = make_strategy(**options)
    callback = Note(losses, name, act if rank == victim else None)
    try:
      _fit(strategy, callback)
      result = {'kind': 'fit ended', 'at': time.time()}
    except Exception as e:
      result = told(e)
    strategy.close()
    losses.note(name, 'told', result)
