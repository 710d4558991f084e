"""If workers pass different arguments to `fit`, they raise when the call begins."""

import contextlib
import time

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tf_strategies import process_group

virtual_devices.configure()

_BATCHES = 'steps_per_epoch (or the number of batches)'
_VALIDATED = {'validates': True, 'epochs': 2}
# Name: (method, options of rank 0, options of rank 1, and the text of the error:
# the end of the argument that differs, and the values of the ranks).
_CALLS = {
  'epochs': ('fit', {'epochs': 2}, {'epochs': 3}, 'epochs', 2, 3),
  'rows': ('fit', {}, {'rows': 48}, _BATCHES, 8, 6),
  'own_data': (
    'fit',
    {'is_own': True, 'steps_per_epoch': 2},
    {'is_own': True, 'steps_per_epoch': 3},
    *(_BATCHES, 2, 3),
  ),
  'validation_steps': (
    'fit',
    {'validates': True, 'validation_steps': 1},
    {'validates': True, 'validation_steps': 3},
    *('validation_steps', 1, 3),
  ),
  'validation_freq': (
    'fit',
    {**_VALIDATED, 'validation_freq': 1},
    {**_VALIDATED, 'validation_freq': 2},
    *('validation_freq', 1, 2),
  ),
  'validation_data': (
    *('fit', {}, {'validates': True}),
    *('validation_data (given or not)', 'False', 'True'),
  ),
  'run_eagerly': (
    *('fit', {}, {'run_eagerly': True}, 'run_eagerly', 'False', 'True'),
  ),
  **{
    method: (
      *(method, {'steps': 1}, {'steps': 3}, 'or the number of batches)', 1, 3),
    )
    for method in ('evaluate', 'predict')
  },
}


def _strategy(kind):
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


def _call_all(rank, kind):
  """Returns this worker's error and its delay for each pair of calls."""
  found = {}
  with contextlib.closing(_strategy(kind)) as strategy:
    with strategy.scope():
      model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
      model.compile('sgd', 'mse')
    # Equal calls must not raise.
    _call(model, *_CALLS['validation_steps'][:2])
    for name, (method, *options, _, _, _) in _CALLS.items():
      started = time.monotonic()
      try:
        _call(model, method, options[rank])
        error = 'none'
      except tfs.errors.CollectiveMismatchError as e:
        error = str(e)
      found[name] = error, time.monotonic() - started
    # TensorFlow's coordination service ends with rank 0.
    strategy.extended.communicator.exchange('end', None)
  return found


class MismatchedCallsTest(parameterized.TestCase):
  @tiers.parameters('multi_worker_ring', tiers.soak('multi_worker_collective'))
  def test_every_worker_raises_at_once(self, kind):
    results = processes.run_workers(_call_all, 2, args=(kind,), deadline=240)
    for name, (*_, option, first, second) in _CALLS.items():
      for message, seconds in (result[name] for result in results):
        with self.subTest(name):
          self.assertIn(
            f'{option} to be the same on all workers: rank 0 has {first}, rank 1 has '
            f'{second}. Fix: ',
            message,
          )
          self.assertLess(seconds, 30)


if __name__ == '__main__':
  absltest.main()
