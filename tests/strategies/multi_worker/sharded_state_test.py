"""Optimizer state that workers divide among themselves, in real processes."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.strategies import sharded_models as models

virtual_devices.configure()

_DEADLINE_SECONDS = 280
# Limit of a step's bytes, relative to plain gradients and metrics.
_MOST_BYTES = 1.02


def ring(devices=1, sharded=True, **options):
  return tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(**options),
    devices=virtual_devices.names(devices)[::-1],
    shard_optimizer_state=sharded,
  )


class _Count(keras.callbacks.Callback):
  """Records the bytes sent until the end of each step."""

  def __init__(self, group):
    super().__init__()
    self._group, self.sent = group, []

  def on_train_batch_end(self, batch, logs=None):
    self.sent.append(self._group.bytes_sent)


def _measure(rank, devices):
  """Returns the bytes of a step and of stored state, with and without `sharded`."""
  del rank
  found = {}
  for sharded in (True, False):
    strategy = ring(devices, sharded)
    count = _Count(strategy.process_group)
    try:
      model = models.train(
        models.OPTIMIZERS['plain'],
        strategy,
        model=models.large_model,
        callbacks=[count],
      )
      report = strategy.communication_report()
      found[sharded] = (
        np.diff(count.sent).tolist(),
        models.stored_bytes(model),
        report['calls'],
        4 * model.count_params(),
      )
    finally:
      strategy.close()
  return found


class CostTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    ('two', 2, 1),
    tiers.soak('three', 3, 1),
    tiers.soak('two_of_two', 2, 2),
  )
  def test_bytes(self, workers, devices):
    by_worker = processes.run_workers(
      _measure, workers, args=(devices,), deadline=_DEADLINE_SECONDS
    )
    for found in by_worker:
      (steps, (stored, whole), calls, _) = found[True]
      (before, (all_of_it, _), calls_before, parameters) = found[False]
      self.assertGreater(min(before), parameters // 2)
      for mine, theirs in zip(steps, before, strict=True):
        self.assertLess(mine, theirs * _MOST_BYTES)
      self.assertEqual(all_of_it, whole * devices)
      self.assertLess(stored, whole * (1 / workers + 0.05))
      self.assertGreater(stored, whole / workers)
      self.assertGreater(calls['reduce_scatter'], 0)
      self.assertNotIn('reduce_scatter', calls_before)


def _save(rank, directory):
  """Trains, saves in each way, continues, and returns the final state."""
  strategy = ring()
  try:
    model = models.train(models.OPTIMIZERS['loss_scale'], strategy)
    checkpoint = tfs.Run(f'{directory}/run', model)
    checkpoint.restore()
    checkpoint.save(epoch=1)
    # Each worker writes its own file, although one file would suffice.
    model.save(f'{directory}/{rank}.keras')
    model.fit(*models.numbers(), batch_size=13, shuffle=False, verbose=0)
    return models.state(model)
  finally:
    strategy.close()


def _load_both(rank, directory, strategies=(None, None)):
  """Loads in each way, continues, and returns the final states."""
  del rank
  return [
    _load(directory, way, strategy)
    for way, strategy in zip(('run', 'keras'), strategies, strict=True)
  ]


def _load(directory, way, strategy):
  strategy = ring() if strategy is None else strategy
  try:
    with strategy.scope():
      if way == 'keras':
        model = keras.models.load_model(f'{directory}/1.keras')
      else:
        model = models.dense_model()
        model.compile(models.OPTIMIZERS['loss_scale'](), 'mse')
    if way == 'run':
      position = tfs.Run(f'{directory}/run', model).restore()
      assert position.epoch == 1, position
    model.fit(*models.numbers(), batch_size=13, shuffle=False, verbose=0)
    return models.state(model)
  finally:
    if hasattr(strategy, 'close'):
      strategy.close()


class CheckpointTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_saved_by_two_loaded_by_three_and_one(self):
    directory = self.create_tempdir().full_path
    saved, other = processes.run_workers(
      _save, 2, args=(directory,), deadline=_DEADLINE_SECONDS
    )
    loaded = processes.run_workers(
      _load_both, 3, args=(directory,), deadline=_DEADLINE_SECONDS
    )
    one_device = [tf.distribute.get_strategy()] * 2
    loaded.append(_load_both(0, directory, one_device))
    for state in (other, *itertools.chain(*loaded)):
      for mine, theirs in zip(saved, state, strict=True):
        for a, b in zip(mine, theirs, strict=True):
          self.assertAllClose(a, b, 1e-6, 1e-6)


if __name__ == '__main__':
  tf.test.main()
