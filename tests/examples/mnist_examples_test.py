"""Both training programs equal one device and resume exactly."""

import importlib.util
import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tf_case, virtual_devices, weights
from tests.examples import pages

virtual_devices.configure()

_FIT, _LOOP = 'mnist_keras_fit', 'mnist_custom_loop'

# Four epochs of 1,437 digits in batches of 359. The last batch of an epoch has one
# row. Of the others, four replicas get 89, 90, 90 and 90 rows.
_TWENTY_STEPS = {
  'dataset': 'digits',
  'model': 'mlp',
  'global_batch_size': 359,
  'epochs': 4,
  'verbose': False,
}
# Two epochs of three steps, the shortest run that can be interrupted.
_SHORT = {
  **_TWENTY_STEPS,
  'global_batch_size': 64,
  'steps_per_epoch': 3,
  'epochs': 2,
}


class MnistExamplesTest(tf_case.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(keras.config.set_dtype_policy, 'float32')

  def _train(self, name, options, devices=0, **changes):
    """Returns the weights (with the optimizer's variables) and the report of a run."""
    path = os.path.join(self.create_tempdir(), 'weights.npz')
    changes = {'save_weights': path, 'num_virtual_devices': devices, **changes}
    report = pages.run(name, **{**options, **changes})
    return dict(np.load(path)), report

  def test_twenty_steps_equal_one_device(self):
    name = _FIT
    one, one_report = self._train(name, _TWENTY_STEPS, strategy='one_device')
    four, report = self._train(name, _TWENTY_STEPS, devices=4)
    largest, where = weights.largest_difference(one, four)
    self.assertLessEqual(largest, 1e-5, where)
    self.assertEqual(report['steps'], 20)
    self.assertEqual(report['replicas'], 4)
    self.assertEqual(report['all_reduce']['calls']['all_reduce'], 20)
    for split in ('train', 'test'):
      for metric, value in one_report[split].items():
        self.assertAllClose(value, report[split][metric], 1e-4, 1e-5)
    # Training moved every variable, so that equality means something.
    start, _ = self._train(
      name, _TWENTY_STEPS, strategy='one_device', learning_rate=1e-12
    )
    for variable in ('model/mlp/hidden_1/kernel', 'model/mlp/logits/kernel'):
      self.assertGreater(np.abs(one[variable] - start[variable]).max(), 1e-2)

  @pytest.mark.smoke
  def test_both_examples_train_the_same_weights(self):
    fit, loop = (
      self._train(name, _SHORT, strategy='one_device')[0]
      for name in (_FIT, _LOOP)
    )
    self.assertLessEqual(weights.largest_difference(fit, loop)[0], 1e-6)

  def test_resumed_run_is_exact(self):
    name = _LOOP
    options = {**_SHORT, 'warmup_steps': 5, 'dropout': 0.2}
    straight, _ = self._train(name, options, 2)
    options['checkpoint_dir'] = self.directory
    self._train(name, options, 2, epochs=1)
    resumed, report = self._train(name, options, 2)
    self.assertEqual(report['steps'], 6)
    self.assertEqual(report['steps_this_run'], 3)
    self.assertEqual(report['all_reduce']['calls']['all_reduce'], 3)
    self.assertSameElements(straight, resumed)
    for variable, value in straight.items():
      self.assertAllEqual(value, resumed[variable], variable)

    # No steps are left: the weights are only restored and evaluated.
    again, report = self._train(name, options, 2)
    self.assertEqual(weights.largest_difference(again, resumed)[0], 0)
    self.assertEqual(report['steps_this_run'], 0)
    self.assertIsNone(report['train'])
    self.assertGreater(report['test']['accuracy'], 0)

  @parameterized.parameters(_FIT, _LOOP)
  def test_local_steps_train_in_mixed_precision(self, name):
    options = {'local_steps': 2, 'mixed_precision': 'mixed_float16'}
    options['strategy'] = 'multi_worker_ring'
    path = self.path('run.json')
    _, report = self._train(name, _SHORT, 1, **options, timeline=path)
    self.assertEqual(report['iterations'], 6)
    with open(path.replace('.json', '-0.json'), encoding='utf-8') as f:
      events = json.load(f)['traceEvents']
    steps = [e['args']['step'] for e in events if e.get('cat') == 'step']
    self.assertEqual(steps, [*range(1, 7)])

  def test_parameter_server_without_cluster_equals_one_device(self):
    one, servers = (
      self._train(_FIT, _SHORT, **options)[0]
      for options in (
        {'strategy': 'one_device'},
        {'strategy': 'parameter_server', 'worker_input': True},
      )
    )
    self.assertLessEqual(weights.largest_difference(one, servers)[0], 1e-6)

  @parameterized.parameters(_FIT, _LOOP)
  def test_tensorboard_logs_are_written(self, name):
    if importlib.util.find_spec('tensorboard') is None:
      self.skipTest('TensorBoard is not installed')
    self._train(name, _SHORT, epochs=1, log_dir=self.directory)
    self.assertCountEqual(os.listdir(self.directory), ['train', 'validation'])

  @parameterized.parameters((_FIT, 'ring_mirrored'), (_LOOP, 'central_storage'))
  @pytest.mark.soak
  def test_mnist_in_three_epochs(self, name, strategy):
    path = os.environ.get('TFS_MNIST_NPZ')
    if not path:
      self.skipTest('TFS_MNIST_NPZ does not name an .npz file of MNIST')
    options = {'data_path': path, 'num_virtual_devices': 4, 'verbose': False}
    report = pages.run(name, **options, strategy=strategy)
    self.assertGreaterEqual(report['test']['accuracy'], 0.985)


if __name__ == '__main__':
  tf.test.main()
