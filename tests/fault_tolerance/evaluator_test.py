"""A `SidecarEvaluator` evaluates the checkpoints of a model in training."""

import functools
import os
import pathlib
import shutil
import tempfile
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from tensorboard.backend.event_processing import event_accumulator

import tf_strategies as tfs
from tests import tf_case, virtual_devices
from tf_strategies.checkpoint import checkpointer

virtual_devices.configure()


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
  """Trains a model and keeps the expected evaluations of its checkpoints."""

  def __init__(self, directory, strategy=None, **options):
    with (strategy or tf.distribute.get_strategy()).scope():
      self.model = _model(**options)
    self.run = tfs.Run(directory, self.model, max_to_keep=10)
    self.expected = {}

  def step(self, epochs=1):
    """Trains, saves, and returns the name of the checkpoint."""
    self.model.fit(_data(), epochs=epochs, verbose=0)
    results = self.model.evaluate(_data(), return_dict=True, verbose=0)
    name = os.path.basename(self.run.save(epoch=1))
    self.expected[name] = int(self.model.optimizer.iterations.numpy()), results
    return name


@functools.cache
def _trained():
  """Returns a training with three checkpoints, and their directory."""
  directory = tempfile.mkdtemp()
  training = Training(directory, tfs.RingMirroredStrategy(['CPU:0', 'CPU:1']))
  for epochs in (1, 2, 1):
    training.step(epochs)
  return training, directory


class _EvaluatorTest(tf_case.TestCase):
  def trained(self):
    """Returns a training whose checkpoints are copied to `self.directory`."""
    training, directory = _trained()
    shutil.copytree(directory, self.directory, dirs_exist_ok=True)
    return training

  def finish(self):
    checkpointer.Checkpointer(self.directory).mark_finished()

  def evaluator(self, model=None, data=None, **options):
    options = {'poll_seconds': 0.05, 'idle_timeout_seconds': 60.0, **options}
    return tfs.SidecarEvaluator(
      model or _model(seed=2), data or _data(), self.directory, **options
    )

  def assert_evaluations(self, evaluations, training, names=None):
    """Checks that `evaluations` equal those of the trained model, in order."""
    names = list(training.expected) if names is None else names
    self.assertEqual([e.path for e in evaluations], list(map(self.path, names)))
    for name, evaluation in zip(names, evaluations, strict=True):
      iterations, results = training.expected[name]
      self.assertEqual(evaluation.iterations, iterations)
      self.assertAllClose(evaluation.results, results, 1e-6, 1e-6)


class EvaluationsTest(_EvaluatorTest):
  @pytest.mark.smoke
  def test_checkpoints_are_evaluated_in_order(self):
    training = self.trained()
    self.finish()
    evaluations = self.evaluator().run()
    self.assert_evaluations(evaluations, training)
    self.assertEqual([e.iterations for e in evaluations], [4, 12, 16])
    self.assertLen({e.results['loss'] for e in evaluations}, 3)
    self.assertEqual(set(evaluations[0].results), {'loss', 'mae'})

  def test_accumulated_gradients(self):
    def accumulating():
      return keras.optimizers.SGD(gradient_accumulation_steps=2)

    training = Training(self.directory, optimizer=accumulating())
    training.step()
    self.finish()
    model = _model(seed=2, optimizer=accumulating())
    evaluations = self.evaluator(model).run()
    self.assert_evaluations(evaluations, training)
    self.assertEqual([e.iterations for e in evaluations], [2])

  def test_ends_after_max_evaluations_or_idle_timeout(self):
    training = self.trained()
    *first, last = training.expected
    evaluator = self.evaluator(max_evaluations=2, idle_timeout_seconds=0.5)
    self.assert_evaluations(evaluator.run(), training, first)
    start = time.monotonic()
    self.assert_evaluations(evaluator.run(), training, [last])
    self.assertGreaterEqual(time.monotonic() - start, 0.5)
    self.directory = self.path('missing')
    self.assertEmpty(self.evaluator(idle_timeout_seconds=0.2).run())

  @parameterized.parameters(
    ('manifest.json', None),
    ('arrays.bin', lambda raw: raw[:99] + bytes([~raw[99] & 255])),
  )
  def test_damaged_or_deleted_checkpoint_is_skipped(self, name, damage):
    training = self.trained()
    first, *others = training.expected
    path = self.path(first)
    file = pathlib.Path(path, name)
    if damage is None:
      file.unlink()
    else:
      file.write_bytes(damage(file.read_bytes()))
    self.finish()
    with self.assertLogs('absl', 'WARNING') as logs:
      evaluations = self.evaluator().run()
    self.assert_evaluations(evaluations, training, others)
    reason = 'was deleted' if damage is None else 'cannot be read'
    self.assertIn(f'Skipped {path}, which {reason}', logs.output[0])

  def test_rewritten_checkpoint_is_evaluated_again(self):
    training = Training(self.directory)
    evaluator = self.evaluator(max_evaluations=1)
    name = training.step()
    self.assert_evaluations(evaluator.run(), training)
    shutil.rmtree(self.path(name))
    self.assertEqual(training.step(), name)
    (again,) = evaluator.run()
    self.assertEqual((again.path, again.iterations), (self.path(name), 8))

  def test_steps_limit_the_batches(self):
    self.trained()
    options = {'max_evaluations': 1}
    (of_two,) = self.evaluator(data=_data().repeat(), steps=2, **options).run()
    (of_part,) = self.evaluator(data=_data().take(2), **options).run()
    (of_all,) = self.evaluator(**options).run()
    self.assertAllClose(of_two.results, of_part.results)
    self.assertNotAllClose(of_two.results['loss'], of_all.results['loss'])


class MismatchTest(_EvaluatorTest):
  def assert_refused(self, pattern, **options):
    with self.assertRaisesRegex(tfs.errors.CheckpointMismatchError, pattern):
      self.evaluator(**options).run()

  def test_other_shapes_are_refused(self):
    self.trained()
    self.assert_refused('00001.*shape', model=_model(width=5))

  @parameterized.parameters(False, True)
  def test_other_optimizer_variables_are_ignored(self, is_built):
    training = Training(self.directory, optimizer='sgd')
    training.step()
    model = _model(seed=2, optimizer=keras.optimizers.SGD(momentum=0.9))
    if is_built:
      model.optimizer.build(model.trainable_variables)
    evaluations = self.evaluator(model, max_evaluations=1).run()
    self.assert_evaluations(evaluations, training)


class OtherFormatTest(_EvaluatorTest):
  def test_tensorflow_checkpoints_are_refused(self):
    tf.train.Checkpoint(model=_model()).save(f'{self.directory}/ckpt')
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'tf.train.Checkpoint.*tfs.Run'
    ):
      self.evaluator(idle_timeout_seconds=1).run()


class TensorBoardTest(_EvaluatorTest):
  def test_scalars_are_written_at_training_steps(self):
    self.trained()
    self.finish()
    log_dir = self.create_tempdir().full_path
    board = keras.callbacks.TensorBoard(log_dir)
    evaluations = self.evaluator(callbacks=[board]).run()
    self.assertLen(evaluations, 3)
    events = event_accumulator.EventAccumulator(f'{log_dir}/validation')
    events.Reload()
    for name in ('loss', 'mae'):
      found = {
        event.step: float(tf.make_ndarray(event.tensor_proto))
        for event in events.Tensors(f'evaluation_{name}_vs_iterations')
      }
      expected = {e.iterations: e.results[name] for e in evaluations}
      self.assertAllClose(found, expected)


class OptionsTest(_EvaluatorTest):
  def test_invalid_model_or_data_is_refused(self):
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile('sgd', 'mse')
    for options, message in (
      ({'data': _data().repeat()}, 'infinite data'),
      ({'model': keras.Sequential([keras.Input([3])])}, 'not compiled'),
      ({'model': unbuilt}, 'without variables'),
    ):
      with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
        self.evaluator(**options)


if __name__ == '__main__':
  tf.test.main()
