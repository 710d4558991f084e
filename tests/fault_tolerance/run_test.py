"""A run restores everything, continues `fit`, and belongs to one job."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tf_case, virtual_devices
from tests.programs import common
from tf_strategies import errors
from tf_strategies.checkpoint import checkpointer, model_state, ownership
from tf_strategies.checkpoint.position import Position
from tf_strategies.fault_tolerance import run as run_lib

virtual_devices.configure()

_DEADLINE_SECONDS = 240


def _strategy(replicas):
  return tfs.RingMirroredStrategy([f'CPU:{i}' for i in range(replicas)])


def _model(
  strategy=None, units=1, seed=1, optimizer='adam', clears_session=True
):
  """Returns a small model with dropout, by default after `clear_session`."""
  if clears_session:
    keras.backend.clear_session()
  keras.utils.set_random_seed(seed)
  strategy = strategy or tf.distribute.get_strategy()
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.Input([3]),
        keras.layers.Dense(4),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(units),
      ]
    )
    model.compile(
      keras.optimizers.get(optimizer)
      if strategy.num_replicas_in_sync > 1
      else optimizer,
      'mse',
      metrics=['mae'],
    )
    model.optimizer.build(model.trainable_variables)
  return model


def _fit(model, steps=2):
  x = np.arange(24 * steps, dtype=np.float32).reshape(-1, 3) / 10
  model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False)


class _Adversarial(keras.Model):
  """A model without `call`, with two players that have separate optimizers."""

  def __init__(self):
    super().__init__()
    self.players = [common.linear(3, 3) for _ in range(2)]
    self.first, self.second = (keras.optimizers.Adam(0.1) for _ in range(2))

  def train_step(self, x):
    turns = zip(self.players, (self.first, self.second), strict=True)
    for player, optimizer in turns:
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.sin(self.players[1](self.players[0](x))))
      weights = player.trainable_weights
      optimizer.apply(tape.gradient(loss, weights), weights)
    return {'loss': loss}


def _adversarial(strategy):
  keras.backend.clear_session()
  keras.utils.set_random_seed(1)
  with strategy.scope():
    model = _Adversarial()
    model.compile()
    model.first.build(model.players[0].trainable_weights)
    model.second.build(model.players[1].trainable_weights)
  return model


class RunTest(tf_case.TestCase):
  def _run(self, model=None, **options):
    return tfs.Run(self.directory, model or _model(), **options)

  def _state(self, model):
    variables = model_state.name_variables(model, model.optimizer)
    return {k: v.value.numpy() for k, v in variables.items()}

  @pytest.mark.smoke
  def test_restores_everything_on_another_number_of_replicas(self):
    before = _model(_strategy(3))
    _fit(before)
    checkpoint = self._run(before)
    checkpoint.save(epoch=3, step=2)
    saved, results = self._state(before), before.get_metrics_result()
    # Kernels and biases, their moments, counters, and the state of the dropout.
    self.assertLen([k for k in saved if k.startswith('model/')], 5)
    self.assertLen([k for k in saved if k.startswith('optimizer/')], 10)

    model = _model(_strategy(2), seed=2)
    _fit(model, steps=1)  # The model has metrics and other weights.
    self.assertNotAllClose(
      saved['model/sequential/dense/kernel'],
      self._state(model)['model/sequential/dense/kernel'],
    )
    checkpoint = self._run(model)
    self.assertEqual(checkpoint.restore(), Position(3, 2))
    for name, value in self._state(model).items():
      np.testing.assert_array_equal(value, saved[name], name)
    model.reset_metrics()
    checkpoint._state.restore_metrics()
    for name, value in model.get_metrics_result().items():
      self.assertAllClose(value, results[name], rtol=1e-6, msg=name)

  def test_model_with_two_optimizers_and_without_call_is_restored(self):
    data = tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat(4)
    straight = _adversarial(_strategy(2))
    straight.fit(data, epochs=2, verbose=0)
    for epochs in (1, 2):
      model = _adversarial(_strategy(2))
      run = self._run(model)
      epoch, _ = run.restore()
      model.fit(
        data, initial_epoch=epoch, epochs=epochs, callbacks=[run], verbose=0
      )
    for expected, found in zip(straight.weights, model.weights, strict=True):
      np.testing.assert_array_equal(expected.numpy(), found.numpy())

  @pytest.mark.smoke
  def test_fit_continues(self):
    x = np.arange(48, dtype=np.float32).reshape([16, 3]) / 10
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    straight = _model()
    straight.fit(batches, epochs=3, verbose=0)
    model = _model()
    run = self._run(model)
    model.fit(batches, epochs=1, verbose=0)
    model.fit(batches.take(2), verbose=0)
    run.save(epoch=1, step=2)

    recorded = []

    def record(batch, logs):
      del logs
      # An evaluation here must not affect the resumed epoch.
      if not recorded:
        model.evaluate(batches, verbose=0)
      recorded.append(batch)

    recorder = keras.callbacks.LambdaCallback(
      on_epoch_begin=record, on_train_batch_begin=record
    )
    model = _model()
    run = self._run(model)
    epoch, _ = run.restore()
    history = model.fit(
      batches,
      initial_epoch=epoch,
      epochs=3,
      callbacks=[run, recorder],
      verbose=0,
    )
    self.assertEqual(history.epoch, [1, 2])
    self.assertEqual(recorded, [1, 2, 3, 2, 0, 1, 2, 3])
    self.assertEqual(int(model.optimizer.iterations.numpy()), 12)
    for expected, found in zip(straight.weights, model.weights, strict=True):
      np.testing.assert_array_equal(expected.numpy(), found.numpy())
    self.assertEqual(run.restore(), Position(3))

  def test_model_created_again_in_one_process_is_restored(self):
    before = _model()
    _fit(before)
    self._run(before).save(epoch=1)
    saved = list(self._state(before).values())
    # Keras counts the models and layers of a process in their names.
    again = _model(seed=2, clears_session=False)
    self.assertNotEqual(again.weights[0].path, before.weights[0].path)
    self.assertEqual(self._run(again).restore(), Position(1))
    for value, found in zip(saved, self._state(again).values(), strict=True):
      np.testing.assert_array_equal(value, found)

  def test_another_optimizer_in_one_process_is_refused(self):
    # Variables of the same shapes, in the same order.
    momentum = keras.optimizers.SGD(momentum=0.9)
    self._run(_model(optimizer=momentum)).save(epoch=1)
    rmsprop = keras.optimizers.RMSprop()
    again = _model(optimizer=rmsprop, clears_session=False)
    self.assertLen(rmsprop.variables, len(momentum.variables))
    with self.assertRaises(tfs.errors.CheckpointMismatchError):
      self._run(again).restore()

  def test_another_dtype_is_refused(self):
    self._run().save(epoch=1)
    keras.config.set_dtype_policy('float64')
    self.addCleanup(keras.config.set_dtype_policy, 'float32')
    with self.assertRaisesRegex(
      tfs.errors.CheckpointMismatchError, 'float32 there and float64 here'
    ):
      self._run(_model(clears_session=False)).restore()

  def test_checkpoint_of_another_run_is_refused(self):
    same = {'seed': 1}
    self._run(_model(), settings=same).save(1)
    for changes, settings, message in (
      ({'units': 2}, same, r'has shape \[4, 1\] there and \[4, 2\] here'),
      ({'optimizer': 'sgd'}, same, 'adam/.* is not in this run'),
      ({}, {'seed': 2}, 'seed was 1 and is 2'),
    ):
      model = _model(**changes)
      before = self._state(model)
      checkpoint = self._run(model, settings=settings)
      with self.assertRaisesRegex(tfs.errors.CheckpointMismatchError, message):
        checkpoint.restore()
      self.assertIsNone(checkpoint.position)
      for name, value in self._state(model).items():
        np.testing.assert_array_equal(value, before[name], name)

  def test_settings_are_compared_as_json(self):
    settings = {'clip': float('nan'), 'sizes': (1, 2)}
    model = _model()
    self._run(model, settings=settings).save(1)
    settings = dict(reversed(settings.items()))
    checkpoint = self._run(model, settings=settings)
    self.assertEqual(checkpoint.restore(), Position(1))
    checkpoint.save(2)

  def test_invalid_position_model_or_settings_are_refused(self):
    checkpoint = self._run()
    for value in (-1, 1.5, True):
      for position in ((value, 0), (0, value)):
        with self.assertRaises(tfs.errors.UnsupportedOptionError):
          checkpoint.save(*position)
    self.assertEqual(checkpoint.restore(), Position())
    two_optimizers = _model()
    two_optimizers.second = keras.optimizers.Adam()
    unbuilt, built = (keras.layers.Dense(1) for _ in range(2))
    sgd = {'optimizer': keras.optimizers.SGD()}
    for model, options, message in (
      (_model(), {'settings': {'seed': {1, 2}}}, 'settings'),
      (two_optimizers, {}, 'optimizer.build'),
      (keras.Sequential([unbuilt]), sgd, 'without variables'),
      (keras.Sequential([keras.Input([3]), built]), {}, 'optimizer=None'),
    ):
      with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
        self._run(model, **options)

  def test_directory_must_equal_checkpoint_dir_of_the_strategy(self):
    model = mock.Mock()
    model.distribute_strategy.options.checkpoint_dir = None
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'checkpoint_dir=None'
    ):
      run_lib.ServerState(self.directory, model, {}, {})

  def test_layers_with_equal_names_are_restored(self):
    class Twins(keras.Model):
      """Two layers with one name, which only functional models refuse."""

      def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(2, name='twin')
        self.two = keras.layers.Dense(2, name='twin')

      def call(self, x):
        return self.two(self.one(x))

    model = Twins()
    model(tf.ones([1, 2]))
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    numbers = [np.full(w.shape, i) for i, w in enumerate(model.get_weights())]
    model.set_weights(numbers)
    checkpoint = self._run(model, optimizer=optimizer)
    checkpoint.save(1)
    model.set_weights([0 * number for number in numbers])
    checkpoint.restore()
    for number, found in zip(numbers, model.get_weights(), strict=True):
      np.testing.assert_array_equal(number, found)


def _fail_as_the_chief(rank, owned, unreadable):
  """Returns the errors of a run that fails only on the chief."""
  strategy = tfs.create_strategy(
    'multi_worker_ring', devices=virtual_devices.names(1)
  )
  found = []

  def note(call):
    try:
      call()
    except (errors.InUseError, errors.StorageError) as e:
      found.append(str(e))

  try:
    checkpoint = tfs.Run(owned, _model(strategy))
    checkpoint.restore()
    note(checkpoint.__enter__)
    note(lambda: checkpoint.save(1))
    checkpoint = tfs.Run(unreadable, _model(strategy))
    error = PermissionError(13, 'Permission denied', 'arrays.bin')
    if rank == 0:
      checkpointer.Checkpointer.open = mock.Mock(side_effect=error)
    note(checkpoint.restore)
    assert checkpoint.position is None
  finally:
    strategy.close()
  return found


class TwoRunsTest(parameterized.TestCase):
  """Two jobs in one directory."""

  def test_failure_of_the_chief_is_raised_on_all_workers(self):
    directory = self.create_tempdir().full_path
    owner = checkpointer.Checkpointer(directory)
    owner.acquire()
    unreadable = self.create_tempdir().full_path
    other = checkpointer.Checkpointer(unreadable)
    other.save([('a', np.arange(3))], {})
    other.release()
    first, second = processes.run_workers(
      _fail_as_the_chief,
      2,
      args=(directory, unreadable),
      deadline=_DEADLINE_SECONDS,
    )
    self.assertLen(first, 3)
    expected_errors = [f'The chief cannot save: {e}' for e in first[:2]]
    self.assertEqual(second[:2], expected_errors)
    self.assertIn('arrays.bin', first[2])
    self.assertRegex(second[2], 'chief.*arrays.bin')
    self.assertIn(f'got run {ownership.run_id()}', first[0])


if __name__ == '__main__':
  tf.test.main()
