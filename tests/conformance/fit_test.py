"""`fit`, `evaluate` and `predict` equal one device's, feature by feature."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers, virtual_devices
from tests.conformance import harness
from tests.conformance.harness import Feature

optimizers = keras.optimizers


def _tokens(rows):
  """Token ids in which rows share tokens, so that gradients overlap."""
  rng = np.random.default_rng(3)
  return rng.integers(0, 12, (rows, 5)), rng.integers(0, 10, rows)


def _embedding_model():
  layers = keras.layers
  return keras.Sequential(
    [
      layers.Input([5], dtype='int32'),
      layers.Embedding(12, 4),
      layers.Flatten(),
      layers.Dense(harness.NUM_CLASSES),
    ]
  )


def _sync_bn_model():
  return harness.conv_model(keras.layers.BatchNormalization(synchronized=True))


def _regularized_model():
  return harness.conv_model(
    keras.layers.Dense(
      6, kernel_regularizer='l2', kernel_constraint='max_norm'
    ),
    kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2),
  )


FEATURES = (
  Feature('sgd', optimizer=lambda: optimizers.SGD(0.1), mark=tiers.soak),
  Feature('adam', optimizer=lambda: optimizers.Adam(1e-2), mark=tiers.soak),
  Feature(
    'adamw',
    optimizer=lambda: optimizers.AdamW(1e-2, weight_decay=0.1),
    mark=tiers.soak,
  ),
  Feature('last_batch_of_5_rows', rows=69),
  Feature('last_batch_of_2_rows', rows=66, mark=tiers.soak),
  Feature('last_batch_of_1_row', rows=65, mark=tiers.soak),
  Feature('only_5_rows', rows=5, mark=tiers.soak),
  Feature('only_1_row', rows=1, mark=tiers.soak),
  Feature(
    'clipnorm',
    rows=69,
    optimizer=lambda: optimizers.SGD(0.1, clipnorm=0.05),
    mark=tiers.soak,
  ),
  Feature(
    'clipvalue',
    rows=69,
    optimizer=lambda: optimizers.SGD(0.1, clipvalue=0.01),
    mark=tiers.soak,
  ),
  Feature(
    'global_clipnorm',
    rows=69,
    optimizer=lambda: optimizers.SGD(0.1, global_clipnorm=0.05),
    mark=tiers.soak,
  ),
  Feature(
    'sync_batch_normalization', rows=69, model=_sync_bn_model, mark=tiers.soak
  ),
  Feature(
    'sync_batch_normalization_1_row',
    rows=65,
    model=_sync_bn_model,
    mark_of_others=tiers.soak,
  ),
  Feature(
    'regularizers_and_constraint',
    rows=69,
    model=_regularized_model,
    mark=tiers.soak,
  ),
  Feature(
    'class_weight',
    rows=69,
    fit={'class_weight': {i: 0.5 + i / 5 for i in range(10)}},
    mark=tiers.soak,
  ),
  Feature(
    'sample_weight',
    rows=69,
    fit={'sample_weight': np.linspace(0.1, 2.0, 69, dtype=np.float32)},
    compile={'weighted_metrics': ['accuracy']},
  ),
  Feature(
    'embedding', rows=69, model=_embedding_model, data=_tokens, mark=tiers.soak
  ),
  Feature(
    'embedding_clipnorm',
    rows=69,
    model=_embedding_model,
    data=_tokens,
    optimizer=lambda: optimizers.SGD(0.1, clipnorm=0.05),
    mark=tiers.smoke,
    mark_of_others=tiers.smoke,
  ),
  Feature(
    'steps_per_execution',
    rows=133,
    compile={'steps_per_execution': 3},
  ),
  Feature(
    'run_eagerly', rows=69, compile={'run_eagerly': True}, mark=tiers.soak
  ),
  Feature('run_eagerly_1_row', rows=65, compile={'run_eagerly': True}),
  Feature(
    'validation_data',
    rows=69,
    fit={'validation_data': harness.images(39), 'validation_batch_size': 32},
    mark=tiers.soak,
  ),
)


class FitTest(harness.ConformanceTest, parameterized.TestCase):
  @tiers.named_parameters(
    *harness.table(FEATURES),
    *tiers.every(
      tiers.soak, harness.table(FEATURES, [harness.CENTRAL_STORAGE_OF_2])
    ),
  )
  def test_equals_one_device(self, case, feature):
    self.assert_feature(case, feature)

  @tiers.named_parameters(
    ('tf32', True, 'float32', 5e-3),
    tiers.soak('bfloat16', False, 'mixed_bfloat16', 2e-2),
  )
  def test_short_products(self, tf32, policy, tolerance):
    """What is left of 1e-6 where products have 8 or 11 bits. TF32 needs a GPU."""
    if tf32 and virtual_devices.KIND != 'GPU':
      self.skipTest('no GPU: CPUs have no TF32')
    feature = Feature('short', rows=69, policy=policy, tolerance=tolerance)
    experimental = tf.config.experimental
    before = experimental.tensor_float_32_execution_enabled()
    experimental.enable_tensor_float_32_execution(tf32)
    try:
      for case in harness.STRATEGIES:
        with self.subTest(case.name):
          self.assert_feature(case, feature)
    finally:
      experimental.enable_tensor_float_32_execution(before)


if __name__ == '__main__':
  tf.test.main()
