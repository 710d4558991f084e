"""Optimizer state that workers divide among themselves, in real processes."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.strategies import sharded_models as models
from tf_strategies import errors

virtual_devices.configure()

ALL = {**models.OPTIMIZERS, **models.OPTIONS}
_DEADLINE_SECONDS = 280
# Limit of a step's bytes, relative to plain gradients and metrics.
_MOST_BYTES = 1.02


def ring(devices=1, sharded=True, **options):
  return tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(**options),
    devices=virtual_devices.names(devices)[::-1],
    shard_optimizer_state=sharded,
  )


def _train(name, strategy=None):
  """Trains with the named optimizer; 'rows_of_...' trains an embedding."""
  how = {}
  if name.startswith('rows_of_'):
    how = {'data': models.words, 'model': models.embedding_model}
  return models.train(ALL[name.removeprefix('rows_of_')], strategy, **how)


def _train_all(rank, names, devices):
  del rank
  found = {}
  for name in names:
    for sharded in (True, False):
      strategy = ring(devices, sharded)
      try:
        model = _train(name, strategy)
        found[name, sharded] = (
          *models.state(model),
          [[c.numpy() for c in v.value.values] for v in model.weights],
        )
      finally:
        strategy.close()
  return found


class ExactTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    tiers.smoke('two', 2, 1, ('adam', 'accumulation')),
    tiers.soak('three', 3, 1, ('adamw', 'loss_scale', 'rows_of_adagrad')),
    tiers.soak('two_of_two', 2, 2, ('ema', 'clipnorm', 'rows_of_plain')),
    tiers.soak('optimizers', 3, 1, tuple(models.OPTIMIZERS)),
    tiers.soak('options', 3, 1, tuple(models.OPTIONS)),
    tiers.soak(
      'rows_of_tables', 3, 1, tuple(f'rows_of_{name}' for name in ALL)
    ),
  )
  def test_workers_equal_one_device(self, workers, devices, names):
    by_worker = processes.run_workers(
      _train_all, workers, args=(names, devices), deadline=_DEADLINE_SECONDS
    )
    for name in names:
      one = models.state(_train(name))
      weights, state, copies = by_worker[0][name, True]
      for found in by_worker:
        for other, mine in zip(
          found[name, True][:2], (weights, state), strict=True
        ):
          for a, b in zip(other, mine, strict=True):
            self.assertAllEqual(a, b)
        for a in found[name, True][2]:
          self.assertAllEqual(a[0], a[-1])
      self.assertLen(copies[0], devices)
      for expected in (one, by_worker[0][name, False][:2]):
        for mine, theirs in zip((weights, state), expected, strict=True):
          for a, b in zip(mine, theirs, strict=True):
            self.assertAllClose(a, b, 1e-6, 1e-6, msg=name)


class _Count(keras.callbacks.Callback):
  """Records the bytes sent until the end of each step."""

  def __init__(self, group):
    super().__init__()
    self._group, self.sent = group, []

  def on_train_batch_end(self, batch, logs=None):
    self.sent.append(self._group.bytes_sent)


def _compressed(rank, compression):
  del rank
  strategy = ring(compression=compression)
  try:
    return models.train(ALL['momentum'], strategy).get_weights()
  finally:
    strategy.close()


def _measure(rank, devices):
  """Returns the bytes of a step and of stored state, with and without `sharded`."""
  del rank
  found = {}
  for sharded in (True, False):
    strategy = ring(devices, sharded)
    count = _Count(strategy.process_group)
    try:
      model = models.train(
        ALL['plain'],
        strategy,
        models.pictures,
        models.realistic_model,
        batch_size=4,
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


class CompressionTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    tiers.soak('bfloat16', 'bfloat16'), tiers.soak('float16', 'float16')
  )
  def test_gradients_are_rounded_and_weights_equal(self, compression):
    expected = _train('momentum').get_weights()
    first, second = processes.run_workers(
      _compressed, 2, args=(compression,), deadline=_DEADLINE_SECONDS
    )
    farthest = 0.0
    for mine, other, one in zip(first, second, expected, strict=True):
      self.assertAllEqual(mine, other)
      farthest = max(farthest, np.abs(mine - one).max())
    self.assertBetween(farthest, 1e-7, 2e-2)

  def test_what_keeps_a_rest_is_refused(self):
    for options in (
      {'compression': 'int8'},
      {'compression': lambda variable: 'none'},
      {'reproducible': True},
    ):
      with self.assertRaisesRegex(
        errors.UnsupportedOptionError, 'shard_optimizer_state'
      ):
        tfs.MultiWorkerRingStrategy(
          options=tfs.RingOptions(**options), shard_optimizer_state=True
        )


def _save(rank, directory):
  """Trains, saves in each way, continues, and returns the final state."""
  strategy = ring()
  try:
    model = models.train(ALL['loss_scale'], strategy)
    checkpoint = tfs.Run(f'{directory}/run', model)
    checkpoint.restore()
    checkpoint.save(epoch=1)
    # Each worker writes its own file, although one file would suffice.
    model.save(f'{directory}/{rank}.keras')
    model.fit(*models.numbers(), batch_size=13, shuffle=False, verbose=0)
    return models.state(model)
  finally:
    strategy.close()


def _load(rank, directory, way, strategy=None):
  """Loads in one way, continues, and returns the final state."""
  strategy = ring() if strategy is None else strategy
  try:
    with strategy.scope():
      if way == 'keras':
        model = keras.models.load_model(f'{directory}/1.keras')
      else:
        model = models.dense_model()
        model.compile(ALL['loss_scale'](), 'mse')
    if way == 'run':
      position = tfs.Run(f'{directory}/run', model).restore()
      assert position.epoch == 1, position
    model.fit(*models.numbers(), batch_size=13, shuffle=False, verbose=0)
    return models.state(model)
  finally:
    if hasattr(strategy, 'close'):
      strategy.close()


class CheckpointTest(tf.test.TestCase, parameterized.TestCase):
  def test_saved_by_two_loaded_by_three_and_one(self):
    directory = self.create_tempdir().full_path
    saved, other = processes.run_workers(
      _save, 2, args=(directory,), deadline=_DEADLINE_SECONDS
    )
    for way in ('run', 'keras'):
      loaded = processes.run_workers(
        _load, 3, args=(directory, way), deadline=_DEADLINE_SECONDS
      )
      loaded.append(_load(0, directory, way, tf.distribute.get_strategy()))
      for state in (other, *loaded):
        for mine, theirs in zip(saved, state, strict=True):
          for a, b in zip(mine, theirs, strict=True):
            self.assertAllClose(a, b, 1e-6, 1e-6, msg=way)


def _save_alone(rank, directory):
  strategy = ring()
  try:
    model = models.train(ALL['plain'], strategy)
    if rank == 0:
      model.save(os.path.join(directory, 'model.keras'))
    else:
      model.fit(*models.numbers(), batch_size=13, verbose=0)
  except errors.Error as error:
    return type(error).__name__
  finally:
    strategy.close()
  return ''


def _differ(rank):
  try:
    ring(sharded=rank == 0).close()
  except errors.CollectiveMismatchError as error:
    return str(error)
  return ''


def _refuse(rank):
  del rank
  try:
    ring(all_reduce='tree').close()
  except errors.UnsupportedOptionError as error:
    return str(error)
  return ''


class RefusalTest(tf.test.TestCase):
  def test_workers_that_differ(self):
    for text in processes.run_workers(_differ, 2):
      self.assertIn('shard_optimizer_state', text)

  @pytest.mark.soak
  def test_an_algorithm_without_halves(self):
    for text in processes.run_workers(_refuse, 2):
      self.assertIn("'tree'", text)

  @pytest.mark.soak
  def test_a_worker_that_reads_alone_is_an_error_everywhere(self):
    directory = self.create_tempdir().full_path
    for name in processes.run_workers(
      _save_alone, 2, args=(directory,), deadline=_DEADLINE_SECONDS
    ):
      self.assertIn(name, ('CollectiveMismatchError', 'WorkerUnavailableError'))


if __name__ == '__main__':
  tf.test.main()
