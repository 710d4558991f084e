"""Both training programs, in process: equal to one device, exact on resuming."""

import dataclasses
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from examples import (
  common_flags,
  compare_weights,
  mnist_custom_loop,
  mnist_keras_fit,
)
from tests import tiers, virtual_devices

virtual_devices.configure_logical_cpus()

_EXAMPLES = (('fit', mnist_keras_fit.train), ('loop', mnist_custom_loop.train))
_FOUR = [f'CPU:{i}' for i in range(4)]

# Four epochs of 1,437 digits in batches of 359: four of them, of which four
# replicas get 89, 90, 90 and 90 rows, and a single row, for one of them.
_TWENTY_STEPS = common_flags.TrainingOptions(
  dataset='digits',
  model='mlp',
  global_batch_size=359,
  epochs=4,
  verbose=False,
)
# Two epochs of three steps, the least that can be interrupted.
_SHORT = dataclasses.replace(
  _TWENTY_STEPS, global_batch_size=64, steps_per_epoch=3, epochs=2
)


class MnistExamplesTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(keras.config.set_dtype_policy, 'float32')

  def _train(self, train, options, devices=None, **changes):
    """The weights (and optimizer's variables) and the report of a run."""
    path = os.path.join(self.create_tempdir().full_path, 'weights.npz')
    options = dataclasses.replace(options, save_weights=path, **changes)
    report = train(options, devices)
    return compare_weights.read(path), report

  @parameterized.named_parameters(*_EXAMPLES)
  def test_twenty_steps_equal_one_device(self, train):
    one, one_report = self._train(train, _TWENTY_STEPS, strategy='one_device')
    four, report = self._train(train, _TWENTY_STEPS, devices=_FOUR)
    largest, name = compare_weights.largest_difference(one, four)
    self.assertLessEqual(largest, 1e-5, name)
    self.assertEqual(report['steps'], 20)
    self.assertEqual(report['replicas'], 4)
    self.assertEqual(report['all_reduce']['calls']['all_reduce'], 20)
    for split in ('train', 'test'):
      for metric, value in one_report[split].items():
        self.assertAllClose(value, report[split][metric], 1e-4, 1e-5)
    # Training moved every variable: equality is not that of idle runs.
    start, _ = self._train(
      train, _TWENTY_STEPS, strategy='one_device', learning_rate=1e-12
    )
    for name in ('model/mlp/hidden_1/kernel', 'model/mlp/logits/kernel'):
      self.assertGreater(np.abs(one[name] - start[name]).max(), 1e-2)

  def test_both_examples_train_the_same_weights(self):
    fit, loop = (
      self._train(train, _SHORT, strategy='one_device')[0]
      for _, train in _EXAMPLES
    )
    self.assertLessEqual(compare_weights.largest_difference(fit, loop)[0], 1e-6)

  def test_another_seed_trains_other_weights(self):
    weights = [
      self._train(
        mnist_custom_loop.train, _SHORT, strategy='one_device', seed=seed
      )[0]
      for seed in (1, 2)
    ]
    self.assertGreater(compare_weights.largest_difference(*weights)[0], 1e-2)

  @tiers.named_parameters(tiers.soak(_EXAMPLES[0]), _EXAMPLES[1])
  def test_resumed_run_is_exact(self, train):
    options = dataclasses.replace(_SHORT, warmup_steps=5, dropout=0.2)
    two = _FOUR[:2]
    straight, _ = self._train(train, options, two)
    directory = self.create_tempdir().full_path
    self._train(train, options, two, epochs=1, checkpoint_dir=directory)
    resumed, report = self._train(train, options, two, checkpoint_dir=directory)
    self.assertEqual(report['steps'], 6)
    self.assertEqual(report['steps_this_run'], 3)
    self.assertEqual(report['all_reduce']['calls']['all_reduce'], 3)
    self.assertSameElements(straight, resumed)
    for name, value in straight.items():
      self.assertAllEqual(value, resumed[name], name)

    # Nothing is left to do: the weights are restored and evaluated.
    again, report = self._train(train, options, two, checkpoint_dir=directory)
    self.assertEqual(compare_weights.largest_difference(again, resumed)[0], 0)
    self.assertEqual(report['steps_this_run'], 0)
    self.assertIsNone(report['train'])
    self.assertGreater(report['test']['accuracy'], 0)

  def test_checkpoint_of_another_run_is_refused(self):
    directory = self.create_tempdir().full_path
    options = dataclasses.replace(
      _SHORT, strategy='one_device', epochs=1, checkpoint_dir=directory
    )
    mnist_custom_loop.train(options)
    for changes, difference in (
      ({'model': 'cnn'}, "model was 'mlp' and is 'cnn'"),
      ({'optimizer': 'adam'}, 'it lacks variable optimizer/adam/'),
      ({'seed': 5}, 'seed was 0 and is 5'),
      ({'global_batch_size': 32}, 'global_batch_size was 64 and is 32'),
    ):
      with self.subTest(difference):
        other = dataclasses.replace(options, **changes)
        with self.assertRaisesRegex(
          tfs.errors.CheckpointMismatchError, difference
        ):
          mnist_custom_loop.train(other)

  @parameterized.named_parameters(
    ('one_device', 'one_device', 'ring', 'one replica'),
    ('mirrored', 'mirrored', 'builtin', "TensorFlow's own all-reduce"),
  )
  def test_report_says_that_nothing_was_counted(
    self, strategy, all_reduce, reason
  ):
    _, report = self._train(
      mnist_custom_loop.train,
      _SHORT,
      _FOUR[:2],
      strategy=strategy,
      all_reduce=all_reduce,
      epochs=1,
    )
    self.assertFalse(report['all_reduce']['is_counted'])
    self.assertIn(reason, report['all_reduce']['reason'])

  def test_mirrored_counts_the_calls_of_an_op_of_ours(self):
    _, report = self._train(
      mnist_keras_fit.train,
      _SHORT,
      _FOUR[:2],
      strategy='mirrored',
      all_reduce='direct',
      epochs=1,
    )
    self.assertEqual(
      report['all_reduce']['cross_device_ops'], 'DirectAllReduce'
    )
    self.assertEqual(report['all_reduce']['calls']['all_reduce'], 3)

  @tiers.named_parameters(
    tiers.soak('fit', mnist_keras_fit.train, 'mixed_float16'),
    tiers.soak('loop', mnist_custom_loop.train, 'mixed_float16'),
    ('loop_bfloat16', mnist_custom_loop.train, 'mixed_bfloat16'),
  )
  def test_mixed_precision_trains(self, train, policy):
    weights, report = self._train(
      train, _SHORT, _FOUR[:2], mixed_precision=policy, epochs=1
    )
    self.assertEqual(report['mixed_precision'], policy)
    self.assertTrue(np.isfinite(report['train']['loss']))
    exact, _ = self._train(train, _SHORT, strategy='one_device', epochs=1)
    for name in exact:
      self.assertAllClose(exact[name], weights[name], atol=1e-2, msg=name)

  @tiers.named_parameters(
    ('fit', mnist_keras_fit.train, 'ring_mirrored'),
    tiers.soak('loop', mnist_custom_loop.train, 'mirrored'),
  )
  def test_report_counts_every_copy_of_every_variable(self, train, strategy):
    _, one = self._train(train, _SHORT, strategy='one_device', epochs=1)
    (on_one,) = one['variable_bytes'].values()
    # Weights and momenta; what counts steps and metrics is small.
    state = 2 * 4 * one['parameters']
    self.assertBetween(on_one, state + 16, state + 100)
    _, four = self._train(train, _SHORT, _FOUR, strategy=strategy, epochs=1)
    by_device = four['variable_bytes']
    self.assertEqual(list(by_device), four['devices'])
    self.assertEqual(list(by_device.values()), [on_one] * 4)

  @tiers.named_parameters(_EXAMPLES[0], tiers.soak(_EXAMPLES[1]))
  def test_report_tells_the_bytes_of_a_step(self, train):
    _, report = self._train(train, _SHORT, _FOUR, epochs=1)
    # A ring brings 2(N-1)/N of the gradients into each of N devices. Whole
    # tensors travel, so some get a bit more; metrics are a few bytes.
    gradients = 4 * report['parameters']
    moved = report['bytes_per_step']
    self.assertBetween(
      moved['into_all_devices'], 6 * gradients, 6 * gradients + 200
    )
    self.assertBetween(
      moved['into_busiest_device'], 1.5 * gradients, 1.52 * gradients
    )

  @parameterized.named_parameters(
    (
      'one_device',
      {'strategy': 'one_device'},
      {'into_busiest_device': 0.0, 'into_all_devices': 0.0},
    ),
    # It moves something, and does not say how much.
    ('builtin', {'strategy': 'mirrored', 'all_reduce': 'builtin'}, None),
  )
  def test_bytes_that_nobody_counts(self, changes, expected):
    # As many devices as the other test of TensorFlow's own all-reduce has.
    _, report = self._train(
      mnist_keras_fit.train, _SHORT, _FOUR[:2], **changes, epochs=1
    )
    self.assertEqual(report['bytes_per_step'], expected)

  @pytest.mark.soak
  def test_mnist_in_three_epochs(self):
    self._check_mnist(mnist_keras_fit.train)

  @pytest.mark.soak
  def test_mnist_in_three_epochs_of_a_custom_loop(self):
    self._check_mnist(mnist_custom_loop.train)

  @parameterized.named_parameters(*_EXAMPLES)
  @pytest.mark.soak
  def test_mnist_in_three_epochs_of_central_storage(self, train):
    self._check_mnist(train, strategy='central_storage')

  def _check_mnist(self, train, **changes):
    path = os.environ.get('TFS_MNIST_NPZ')
    if not path:
      self.skipTest('TFS_MNIST_NPZ does not name an .npz file of MNIST')
    options = common_flags.TrainingOptions(
      data_path=path, verbose=False, **changes
    )
    report = train(options, _FOUR)
    self.assertGreaterEqual(report['test']['accuracy'], 0.985)
    calls = report['all_reduce']['calls']
    if changes:  # The sums of metrics are counted beside those of gradients.
      self.assertEqual(calls['all_reduce'], 0)
      self.assertGreaterEqual(calls['reduce'], report['steps'])
    else:
      self.assertEqual(calls['all_reduce'], report['steps'])


if __name__ == '__main__':
  tf.test.main()
