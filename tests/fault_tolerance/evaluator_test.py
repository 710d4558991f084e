"""Checkpoints that a model writes while it trains are evaluated beside it."""

import os
import pathlib
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from tensorboard.backend.event_processing import event_accumulator

import tf_strategies as tfs
from tests import docstrings, tiers, virtual_devices
from tf_strategies.checkpoint import checkpointer
from tf_strategies.fault_tolerance import evaluator

virtual_devices.configure()

_FINISHED = checkpointer.FINISHED_FILE


def _model(width=4, optimizer='adam', seed=1):
  keras.utils.set_random_seed(seed)
  model = keras.Sequential(
    [
      keras.Input([3]),
      keras.layers.Dense(width, 'relu', name='hidden'),
      keras.layers.BatchNormalization(name='normal'),
      keras.layers.Dense(1, name='last'),
    ]
  )
  model.compile(optimizer, 'mse', metrics=['mae'])
  return model


def _data():
  x = np.random.default_rng(3).normal(size=(32, 3)).astype(np.float32)
  y = x.sum(axis=1, keepdims=True)
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


class Training:
  """Trains a model and keeps what its checkpoints must evaluate to."""

  def __init__(self, directory, max_to_keep=10, **options):
    self.model = _model(**options)
    self.directory = pathlib.Path(directory)
    self.manager = tf.train.CheckpointManager(
      tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer),
      directory,
      max_to_keep=max_to_keep,
    )
    self.expected = {}

  def step(self, epochs=1):
    """Trains, saves, and returns the path of the checkpoint."""
    self.model.fit(_data(), epochs=epochs, verbose=0)
    results = self.model.evaluate(_data(), return_dict=True, verbose=0)
    path = self.manager.save()
    iterations = int(self.model.optimizer.iterations.numpy())
    self.expected[path] = evaluator.Evaluation(path, iterations, results)
    return path

  def finish(self):
    (self.directory / _FINISHED).touch()


class _EvaluatorTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def evaluator(self, model=None, data=None, **options):
    options = {'poll_seconds': 0.05, 'idle_timeout_seconds': 60.0, **options}
    return tfs.SidecarEvaluator(
      model or _model(seed=2), data or _data(), self.directory, **options
    )

  def assert_evaluations(self, evaluations, training, paths=None):
    """They are what the trained model said of itself, in order."""
    paths = list(training.expected) if paths is None else paths
    self.assertEqual([e.path for e in evaluations], paths)
    for evaluation in evaluations:
      expected = training.expected[evaluation.path]
      self.assertEqual(evaluation.iterations, expected.iterations)
      self.assertAllClose(evaluation.results, expected.results, 1e-6, 1e-6)


class RunTest(_EvaluatorTest):
  @pytest.mark.smoke
  def test_every_checkpoint_in_order(self):
    training = Training(self.directory)
    for epochs in (1, 2, 1):
      training.step(epochs)
    training.finish()
    evaluations = self.evaluator().run()
    self.assert_evaluations(evaluations, training)
    self.assertEqual([e.iterations for e in evaluations], [4, 12, 16])
    self.assertLen({e.results['loss'] for e in evaluations}, 3)
    self.assertEqual(set(evaluations[0].results), {'loss', 'mae'})

  def test_checkpoints_that_come_later(self):
    training = Training(self.directory)
    evaluator = self.evaluator()
    results = []
    thread = threading.Thread(
      target=lambda: results.extend(evaluator.run()), daemon=True
    )
    thread.start()
    for _ in range(3):
      training.step()
    training.finish()
    thread.join(60)
    self.assertFalse(thread.is_alive())
    self.assert_evaluations(results, training)

  def test_ends_after_so_many_and_goes_on_with_the_next(self):
    training = Training(self.directory)
    paths = [training.step() for _ in range(3)]
    evaluator = self.evaluator(max_evaluations=2)
    self.assert_evaluations(evaluator.run(), training, paths[:2])
    training.finish()
    self.assert_evaluations(evaluator.run(), training, paths[2:])

  def test_ends_when_nothing_new_has_come(self):
    training = Training(self.directory)
    training.step()
    start = time.monotonic()
    evaluations = self.evaluator(idle_timeout_seconds=0.5).run()
    self.assertGreaterEqual(time.monotonic() - start, 0.5)
    self.assert_evaluations(evaluations, training)

  def test_directory_that_never_comes(self):
    self.directory = os.path.join(self.directory, 'missing')
    self.assertEmpty(self.evaluator(idle_timeout_seconds=0.2).run())

  def test_deleted_checkpoint_is_skipped(self):
    training = Training(self.directory)
    paths = [training.step() for _ in range(3)]
    for file in training.directory.glob('ckpt-2.*'):
      file.unlink()
    training.finish()
    with self.assertLogs('absl', 'WARNING') as logs:
      evaluations = self.evaluator().run()
    self.assert_evaluations(evaluations, training, [paths[0], paths[2]])
    self.assertLen(logs.output, 1)
    self.assertIn(f'Skipped {paths[1]}, which was deleted', logs.output[0])

  @tiers.parameters(
    tiers.soak('data-00000-of-00001', lambda raw: raw[: len(raw) // 2]),
    ('data-00000-of-00001', lambda raw: b''),
    tiers.soak('data-00000-of-00001', lambda raw: bytes(b ^ 255 for b in raw)),
    ('index', lambda raw: raw[:30]),
    tiers.soak('index', lambda raw: b'x' * len(raw)),
  )
  def test_damaged_checkpoint_is_skipped(self, suffix, damage):
    training = Training(self.directory)
    paths = [training.step() for _ in range(3)]
    file = pathlib.Path(f'{paths[0]}.{suffix}')
    file.write_bytes(damage(file.read_bytes()))
    training.finish()
    with self.assertLogs('absl', 'WARNING') as logs:
      evaluations = self.evaluator().run()
    self.assert_evaluations(evaluations, training, paths[1:])
    self.assertIn(f'Skipped {paths[0]}, which cannot be read', logs.output[0])

  def test_checkpoint_that_is_written_again(self):
    training = Training(self.directory)
    evaluator = self.evaluator(max_evaluations=1)
    path = training.step()
    self.assert_evaluations(evaluator.run(), training)
    training.model.fit(_data(), verbose=0)
    training.manager.save(checkpoint_number=1)
    (again,) = evaluator.run()
    self.assertEqual((again.path, again.iterations), (path, 8))

  def test_steps(self):
    Training(self.directory).step()
    options = {'max_evaluations': 1}
    (of_two,) = self.evaluator(data=_data().repeat(), steps=2, **options).run()
    (of_part,) = self.evaluator(data=_data().take(2), **options).run()
    (of_all,) = self.evaluator(**options).run()
    self.assertAllClose(of_two.results, of_part.results)
    self.assertNotAllClose(of_two.results['loss'], of_all.results['loss'])


class RunTraining(Training):
  """The same with a `RunCheckpoint`."""

  def __init__(self, directory, max_to_keep=10, strategy=None, **options):
    if strategy is None:
      self.model = _model(**options)
    else:
      with strategy.scope():
        optimizer = 'adam'
        self.model = _model(optimizer=optimizer, **options)
    self.directory = pathlib.Path(directory)
    self.checkpoint = tfs.RunCheckpoint(
      directory, self.model, max_to_keep=max_to_keep
    )
    self.manager = mock.Mock(save=lambda: self.checkpoint.save(epoch=1))
    self.expected = {}

  def finish(self):
    self.checkpoint.mark_finished()


class RunCheckpointTest(_EvaluatorTest):
  """Checkpoints of a `RunCheckpoint`."""

  def test_every_checkpoint_in_order(self):
    training = RunTraining(self.directory)
    for epochs in (1, 2, 1):
      training.step(epochs)
    training.finish()
    evaluations = self.evaluator().run()
    self.assert_evaluations(evaluations, training)
    self.assertEqual([e.iterations for e in evaluations], [4, 12, 16])
    self.assertLen({e.results['loss'] for e in evaluations}, 3)

  def test_parts_of_replicas(self):
    strategy = tfs.RingMirroredStrategy(['CPU:0', 'CPU:1'])
    training = RunTraining(self.directory, strategy=strategy)
    training.step()
    training.finish()
    self.assert_evaluations(self.evaluator().run(), training)

  @parameterized.parameters('truncate', 'flip', 'empty', 'delete')
  def test_damaged_checkpoint_is_skipped(self, damage):
    training = RunTraining(self.directory)
    paths = [training.step() for _ in range(3)]
    file = pathlib.Path(paths[0], 'arrays.bin')
    raw = file.read_bytes()
    if damage == 'delete':
      file.unlink()
    else:
      flipped = raw[:99] + bytes([raw[99] ^ 1]) + raw[100:]
      file.write_bytes(
        {'truncate': raw[:99], 'flip': flipped, 'empty': b''}[damage]
      )
    training.finish()
    with self.assertLogs('absl', 'WARNING') as logs:
      evaluations = self.evaluator().run()
    self.assert_evaluations(evaluations, training, paths[1:])
    why = 'was deleted' if damage == 'delete' else 'cannot be read'
    self.assertIn(f'Skipped {paths[0]}, which {why}', logs.output[0])

  def test_other_shapes_are_refused(self):
    RunTraining(self.directory).step()
    with self.assertRaisesRegex(
      tfs.errors.CheckpointMismatchError, 'checkpoint-00000001.*shape'
    ):
      self.evaluator(_model(width=5)).run()

  def test_another_optimizer_is_none_of_its_business(self):
    training = RunTraining(self.directory, optimizer='sgd')
    training.step()
    evaluator = self.evaluator(_model(seed=2), max_evaluations=1)
    self.assert_evaluations(evaluator.run(), training)


class MismatchTest(_EvaluatorTest):
  def assert_refused(self, words, **options):
    with self.assertRaises(tfs.errors.CheckpointMismatchError) as caught:
      self.evaluator(**options).run()
    self.assertIn(words, str(caught.exception))
    self.assertIn('ckpt-1', str(caught.exception))

  def test_other_shapes_are_refused(self):
    Training(self.directory).step()
    self.assert_refused('shape', model=_model(width=5))

  def test_checkpoint_without_the_model_is_refused(self):
    model = _model()
    tf.train.Checkpoint(network=model).save(f'{self.directory}/ckpt')
    self.assert_refused('hidden/kernel')

  def test_checkpoint_without_the_optimizer_is_refused(self):
    # Without it the step is not known. A compiled model has it with it.
    model = keras.Sequential([keras.Input([3]), *_model().layers])
    tf.train.Checkpoint(model=model).save(f'{self.directory}/ckpt')
    self.assert_refused('iteration')

  @parameterized.parameters(False, True)
  def test_other_variables_of_the_optimizer_are_none_of_its_business(
    self, is_built
  ):
    training = Training(self.directory, optimizer='sgd')
    training.step()
    model = _model(optimizer='adam', seed=2)
    if is_built:
      model.optimizer.build(model.trainable_variables)
    evaluations = self.evaluator(model, max_evaluations=1).run()
    self.assert_evaluations(evaluations, training)


class TensorBoardTest(_EvaluatorTest):
  def test_scalars_at_the_steps_of_training(self):
    training = Training(self.directory)
    for _ in range(2):
      training.step()
    training.finish()
    log_dir = self.create_tempdir().full_path
    evaluations = self.evaluator(log_dir=log_dir).run()
    self.assertLen(evaluations, 2)
    events = event_accumulator.EventAccumulator(log_dir)
    events.Reload()
    self.assertEqual(
      set(events.Tags()['tensors']), {'evaluation_loss', 'evaluation_mae'}
    )
    for name in ('loss', 'mae'):
      found = {
        event.step: float(tf.make_ndarray(event.tensor_proto))
        for event in events.Tensors(f'evaluation_{name}')
      }
      expected = {e.iterations: e.results[name] for e in evaluations}
      self.assertAllClose(found, expected)

  def test_log_dir_without_tensorboard_is_refused(self):
    with mock.patch('importlib.util.find_spec', return_value=None):
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'pip install tensorboard'
      ):
        self.evaluator(log_dir=self.directory)
      self.evaluator(log_dir=None)


class OptionsTest(_EvaluatorTest):
  @parameterized.parameters(
    ({'steps': 0}, 'steps=0'),
    ({'max_evaluations': -1}, 'max_evaluations=-1'),
    ({'max_evaluations': True}, 'max_evaluations=True'),
    ({'poll_seconds': 0}, 'poll_seconds=0'),
    ({'poll_seconds': float('nan')}, 'poll_seconds=nan'),
    ({'idle_timeout_seconds': float('inf')}, 'idle_timeout_seconds=inf'),
  )
  def test_number_out_of_range_is_named(self, options, words):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, words):
      self.evaluator(**options)

  def test_infinite_data_is_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'infinite data'
    ):
      self.evaluator(data=_data().repeat())

  def test_model_that_cannot_be_evaluated_is_refused(self):
    layers = [keras.layers.Dense(1)]
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'not compiled'
    ):
      self.evaluator(keras.Sequential([keras.Input([3]), *layers]))
    unbuilt = keras.Sequential(layers)
    unbuilt.compile('sgd', 'mse')
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'no variables yet'
    ):
      self.evaluator(unbuilt)

  def test_public_names_and_example(self):
    self.assertIs(tfs.SidecarEvaluator, evaluator.SidecarEvaluator)
    self.assertIn('SidecarEvaluator', dir(tfs))
    docstrings.assert_examples(self, evaluator.__name__)


if __name__ == '__main__':
  tf.test.main()
