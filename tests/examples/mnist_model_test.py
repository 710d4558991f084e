import itertools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from examples import common_flags, mnist_model
from tests import virtual_devices

virtual_devices.configure_logical_cpus()


class MnistModelTest(tf.test.TestCase, parameterized.TestCase):
  def test_mlp_is_784_16_16_10(self):
    model = mnist_model.build_model('mlp', num_classes=10)
    sizes = [784, 16, 16, 10]
    self.assertEqual(
      model.count_params(),
      sum((n + 1) * m for n, m in itertools.pairwise(sizes)),
    )
    self.assertEqual(model.count_params(), 13002)

  @parameterized.parameters('cnn', 'mlp')
  def test_models_map_images_to_logits(self, name):
    model = mnist_model.build_model(name, num_classes=7)
    logits = model(np.ones([2, 28, 28, 1], np.float32))
    self.assertEqual(logits.shape, (2, 7))
    self.assertNotAllClose(tf.reduce_sum(logits, -1), [1.0, 1.0])

  def test_dropout_is_only_there_if_asked_for(self):
    def layers(dropout):
      model = mnist_model.build_model('cnn', 10, dropout)
      return [type(layer).__name__ for layer in model.layers]

    self.assertNotIn('Dropout', layers(0.0))
    self.assertEqual(layers(0.5)[-2], 'Dropout')

  def test_warmup_rises_linearly_and_stays(self):
    schedule = mnist_model.LinearWarmup(0.8, warmup_steps=4)
    self.assertAllClose(
      [schedule(step) for step in range(6)], [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    )
    config = keras.saving.serialize_keras_object(schedule)
    copy = keras.saving.deserialize_keras_object(config)
    self.assertAllClose(copy(1), schedule(1))

  @parameterized.parameters((False, 0.3), (True, 1.2))
  def test_learning_rate_scales_with_replicas_if_asked_for(self, scale, rate):
    options = common_flags.TrainingOptions(
      learning_rate=0.3, scale_learning_rate=scale
    )
    optimizer = mnist_model.build_optimizer(options, num_replicas=4)
    self.assertAllClose(float(optimizer.learning_rate.numpy()), rate)

  @parameterized.named_parameters(
    ('ours', 'ring_mirrored', 'none', tfs.keras.DistributedOptimizer),
    ('mirrored', 'mirrored', 'none', keras.optimizers.SGD),
    (
      'float16',
      'ring_mirrored',
      'mixed_float16',
      keras.optimizers.LossScaleOptimizer,
    ),
    (
      'bfloat16',
      'ring_mirrored',
      'mixed_bfloat16',
      tfs.keras.DistributedOptimizer,
    ),
  )
  def test_optimizer_is_wrapped_for(self, strategy, precision, expected):
    options = common_flags.TrainingOptions(
      strategy=strategy, mixed_precision=precision
    )
    self.assertIs(type(mnist_model.build_optimizer(options, 1)), expected)


if __name__ == '__main__':
  tf.test.main()
