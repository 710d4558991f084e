"""Optimizer state that is sharded across workers, in real processes."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, tf_case, tiers, virtual_devices
from tests.strategies import sharded_models as models

virtual_devices.configure()

_DEADLINE_SECONDS = 280
# Limit of a step's bytes, relative to plain gradients and metrics.
_MOST_BYTES = 1.02


def ring(devices=1, sharded=True):
  return tfs.MultiWorkerRingStrategy(
    devices=virtual_devices.names(devices)[::-1],
    shard_optimizer_state=sharded,
  )


def _measure(rank, devices, sharded):
  """Returns the bytes of each step and of stored state, the calls, and parameters."""
  del rank
  sent = []
  with contextlib.closing(ring(devices, sharded)) as strategy:
    count = keras.callbacks.LambdaCallback(
      on_train_batch_end=lambda batch, logs: sent.append(
        strategy.process_group.bytes_sent
      )
    )
    model = models.train(
      models.OPTIMIZERS['plain'],
      strategy,
      model=models.large_model,
      callbacks=[count],
    )
    return (
      np.diff(sent).tolist(),
      models.stored_bytes(model),
      strategy.communication_report()['calls'],
      4 * model.count_params(),
    )


def _measure_both(rank, devices):
  return [_measure(rank, devices, sharded) for sharded in (True, False)]


class CostTest(tf_case.TestCase):
  @tiers.named_parameters(
    ('two_workers', 2, 1),
    tiers.soak('three_workers', 3, 1),
    tiers.soak('two_devices_each', 2, 2),
  )
  def test_bytes_sent_and_stored(self, workers, devices):
    by_worker = processes.run_workers(
      _measure_both, workers, args=(devices,), deadline=_DEADLINE_SECONDS
    )
    for found in by_worker:
      (steps, (stored, whole), calls, _), plain = found
      before, (stored_plain, _), calls_before, parameters = plain
      self.assertGreater(min(before), parameters // 2)
      for mine, theirs in zip(steps, before, strict=True):
        self.assertLess(mine, theirs * _MOST_BYTES)
      self.assertEqual(stored_plain, whole * devices)
      self.assertLess(stored, whole * (1 / workers + 0.05))
      self.assertGreater(stored, whole / workers)
      self.assertGreater(calls['reduce_scatter'], 0)
      self.assertNotIn('reduce_scatter', calls_before)


def _save(rank, directory):
  """Trains, saves in both formats, continues, and returns the final state."""
  with contextlib.closing(ring()) as strategy:
    model = models.train(models.OPTIMIZERS['loss_scale'], strategy)
    checkpoint = tfs.Run(f'{directory}/run', model)
    checkpoint.restore()
    checkpoint.save(epoch=1)
    # Each worker writes its own file, although one file would suffice.
    model.save(f'{directory}/{rank}.keras')
    model.fit(*models.numbers(), batch_size=13, shuffle=False, verbose=0)
    return models.state(model)


def _load(rank, directory, strategy=None):
  """Loads from both formats, continues, and returns the final states."""
  del rank
  return [_loaded(directory, source, strategy) for source in ('run', 'keras')]


def _loaded(directory, source, strategy):
  with contextlib.ExitStack() as stack:
    strategy = strategy or stack.enter_context(contextlib.closing(ring()))
    with strategy.scope():
      if source == 'keras':
        model = keras.models.load_model(f'{directory}/1.keras')
      else:
        model = models.dense_model()
        model.compile(models.OPTIMIZERS['loss_scale'](), 'mse')
    if source == 'run':
      position = tfs.Run(f'{directory}/run', model).restore()
      assert position.epoch == 1, position
    model.fit(*models.numbers(), batch_size=13, shuffle=False, verbose=0)
    return models.state(model)


class CheckpointTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_state_of_two_workers_loads_on_three_and_one(self):
    directory = self.create_tempdir().full_path
    saved, other = processes.run_workers(
      _save, 2, args=(directory,), deadline=_DEADLINE_SECONDS
    )
    loaded = processes.run_workers(
      _load, 3, args=(directory,), deadline=_DEADLINE_SECONDS
    )
    loaded.append(_load(0, directory, tf.distribute.get_strategy()))
    for state in (other, *itertools.chain(*loaded)):
      for mine, theirs in zip(saved, state, strict=True):
        for a, b in zip(mine, theirs, strict=True):
          self.assertAllClose(a, b, 1e-6, 1e-6)


if __name__ == '__main__':
  tf.test.main()
