"""With `reproducible`, programs give the same bits for any number of replicas.

Each program runs on one, two and three replicas. With three, the last has one
shard only. The test compares the reports of `fit` and `evaluate`, the weights
and the predictions byte for byte.
"""

import contextlib
import hashlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.programs import common, loops, runner

virtual_devices.configure()
pytestmark = pytest.mark.skipif(
  not virtual_devices.IS_DETERMINISTIC,
  reason='on GPUs set TF_DETERMINISTIC_OPS=1',
)

layers = keras.layers

_SHARDS = 3
_DEADLINE_SECONDS = 280


def _points(rows=78):
  rng = np.random.default_rng(15)
  x = rng.random((rows, 6)).astype('f4')
  return x, (x.sum(1) > 3).astype('f4')


def _fit(optimizer, draw=None, width=16, times=1.0, **options):
  """Trains on unevenly divided rows and returns history, weights and optimizer
  state.
  """
  x, y = _points()
  y *= times
  inputs = layers.Input([6])
  hidden = layers.Dense(width, 'tanh')(inputs)
  if draw is not None:
    hidden = layers.Lambda(lambda h: h + draw(tf.shape(h)))(hidden)
  model = keras.Model(inputs, layers.Dense(1)(hidden))
  model.compile(optimizer, 'mse', **options)
  history = model.fit(x, y, 32, 3, verbose=0)
  state = [v.numpy() for v in model.optimizer.variables]
  return history.history, model.get_weights(), state


def _overflowing():
  """Starts with a loss scale that is too large, so the first steps are skipped."""
  optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(1e-2), initial_scale=2.0**127, dynamic_growth_steps=3
  )
  found = _fit(optimizer, times=64.0)
  assert 0 < int(optimizer.inner_optimizer.iterations.numpy()) < 9
  return found


# In addition to the programs of every strategy.
_OWN = {
  'overflowing': _overflowing,
  'wide': lambda: _fit(keras.optimizers.Adam(1e-2, clipnorm=0.1), width=8192),
  'seeded': lambda: _fit('adam', tf.random.normal),
  'clipped_by_value': lambda: _fit(keras.optimizers.SGD(0.1, clipvalue=0.01)),
  'eager_accumulation': lambda: _fit(
    keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), run_eagerly=True
  ),
}
_PROGRAMS = {**runner.PAGE, **_OWN}
# Rejected because they call `strategy.run`, because XLA compiles their steps, or
# because a step reads `x.shape[0]`, which depends on the shard. With a part of the
# error.
_REFUSED = {
  **dict.fromkeys((*loops.PROGRAMS, 'compiled'), 'with reproducible'),
  'static_length': r'tf\.shape\(x\)\[0\]',
}
for _name in _REFUSED:
  del _PROGRAMS[_name]
# One program for each option and kind of input that changes a step.
_OF_EACH = (
  *_OWN,
  'clipped',
  'hash_table',
  'ragged',
)
# These also run on real workers.
_OF_WORKERS = ('mixed_float16', 'ragged', 'seeded')


def _run(name, strategy):
  return common.run(_PROGRAMS[name], strategy)


def _in_process(name, count):
  return _run(
    name,
    tfs.RingMirroredStrategy(
      virtual_devices.names(count), reproducible=_SHARDS
    ),
  )


def _digest(found) -> str:
  """Returns a SHA-256 hash of everything that a program returned."""
  digest = hashlib.sha256()
  for value in map(np.asarray, tf.nest.flatten(found)):
    digest.update(f'{value.dtype} {value.shape}'.encode())
    is_plain = value.dtype.kind in 'biufc'
    digest.update(value.tobytes() if is_plain else str(value.tolist()).encode())
  return digest.hexdigest()


def _work(rank, names):
  """Returns the digests of programs on one worker."""
  del rank
  virtual_devices.configure()
  strategy = tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(reproducible=_SHARDS),
    devices=virtual_devices.names(1),
  )
  with contextlib.closing(strategy):
    return [_digest(_run(name, strategy)) for name in names]


def _mark(name):
  return (tiers.unmarked if name in _OF_EACH else tiers.soak)(name, name)


class ReproducibleProgramsTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(*map(_mark, _PROGRAMS))
  def test_same_bits(self, name):
    found = _in_process(name, 1)
    if name in runner.PAGE:
      difference = runner.difference(runner.one_device(name), found)
      self.assertLessEqual(difference, runner.limit_of(name))
    want = _digest(found)
    for count in (2, 3):
      self.assertEqual(_digest(_in_process(name, count)), want, f'{count}')

  @tiers.named_parameters(
    tiers.soak('2_workers', 2), tiers.soak('3_workers', 3)
  )
  def test_same_bits_of_workers(self, count):
    results = processes.run_workers(
      _work, count, args=(_OF_WORKERS,), deadline=_DEADLINE_SECONDS
    )
    want = [_digest(_in_process(name, 1)) for name in _OF_WORKERS]
    for found in results:
      self.assertEqual(
        dict(zip(_OF_WORKERS, found, strict=True)),
        dict(zip(_OF_WORKERS, want, strict=True)),
      )

  @parameterized.parameters(*_REFUSED.items())
  def test_refused(self, name, message):
    strategy = tfs.RingMirroredStrategy(
      virtual_devices.names(2), reproducible=_SHARDS
    )
    with (
      self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message),
      strategy.scope(),
    ):
      runner.PROGRAMS[name]()

  def test_another_result_is_found(self):
    want, found = np.float32([1, 2]), np.nextafter(np.float32([1, 2]), 3)
    self.assertNotEqual(_digest([want]), _digest([found]))


if __name__ == '__main__':
  tf.test.main()
