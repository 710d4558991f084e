"""Calls of `fit`, `evaluate` and `predict` that differ between two workers."""

import contextlib
import time

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies import process_group

virtual_devices.configure()

# Name: (call of rank 0, call of rank 1).
CALLS = {
  'epochs': (('fit', {'epochs': 2}), ('fit', {'epochs': 3})),
  'steps_per_epoch': (
    ('fit', {'steps_per_epoch': 4}),
    ('fit', {'steps_per_epoch': 6}),
  ),
  'rows': (('fit', {}), ('fit', {'rows': 48})),
  'own_data': (
    ('fit', {'is_own': True, 'steps_per_epoch': 2}),
    ('fit', {'is_own': True, 'steps_per_epoch': 3}),
  ),
  'validation_steps': (
    ('fit', {'validates': True, 'validation_steps': 1}),
    ('fit', {'validates': True, 'validation_steps': 3}),
  ),
  'validation_freq': (
    ('fit', {'validates': True, 'epochs': 2, 'validation_freq': 1}),
    ('fit', {'validates': True, 'epochs': 2, 'validation_freq': 2}),
  ),
  'validation_data': (('fit', {}), ('fit', {'validates': True})),
  'run_eagerly': (('fit', {}), ('fit', {'run_eagerly': True})),
  'evaluate': (('evaluate', {'steps': 1}), ('evaluate', {'steps': 3})),
  'predict': (('predict', {'steps': 1}), ('predict', {'steps': 3})),
}


def make_strategy(kind):
  """Returns a strategy whose workers wait for each other for 60 s."""
  if kind == 'multi_worker_collective':
    return tfs.MultiWorkerCollectiveStrategy(
      options=tfs.CollectiveOptions(timeout_seconds=60)
    )
  group = process_group.GroupOptions.from_env(collective_timeout_seconds=60)
  return tfs.MultiWorkerRingStrategy(options=tfs.RingOptions(group=group))


def _data(rows, is_own):
  x = np.random.default_rng(0).normal(size=[rows, 4]).astype(np.float32)
  data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
  options = tf.data.Options()
  policy = tf.data.experimental.AutoShardPolicy
  options.experimental_distribute.auto_shard_policy = (
    policy.OFF if is_own else policy.DATA
  )
  return data.with_options(options)


def _call(model, method, options):
  options = {'verbose': 0, **options}
  model.run_eagerly = options.pop('run_eagerly', False)
  data = _data(options.pop('rows', 64), options.pop('is_own', False))
  if method == 'predict':
    data = data.map(lambda x, y: x)
  if options.pop('validates', False):
    options['validation_data'] = _data(32, False)
  getattr(model, method)(data, **options)


def call_all(rank, kind, names):
  """Returns this worker's error and its delay for each pair of calls."""
  told = {}
  with contextlib.closing(make_strategy(kind)) as strategy:
    with strategy.scope():
      model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
      model.compile('sgd', 'mse')
    # Equal calls must not raise.
    _call(model, *CALLS['validation_steps'][0])
    for name in names:
      started = time.monotonic()
      try:
        _call(model, *CALLS[name][rank])
        error = 'none'
      except tfs.errors.CollectiveMismatchError as e:
        error = str(e)
      told[name] = error, time.monotonic() - started
  return told
