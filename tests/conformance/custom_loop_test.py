"""A custom training loop with the same rows equals one device."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tiers
from tests.conformance import harness

_ROWS = 69  # Two full batches of 32 and one of 5.
_EPOCHS = 2


def _sync_bn_model():
  return harness.conv_model(keras.layers.BatchNormalization(synchronized=True))


def _dataset(rows):
  x, y = harness.images(rows)
  return tf.data.Dataset.from_tensor_slices((x, y)).batch(
    harness.GLOBAL_BATCH_SIZE
  )


def _losses(model, x, y, training):
  logits = model(x, training=training)
  return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)


def _one_device_loop(rows, make_model, make_optimizer):
  keras.backend.clear_session()
  keras.utils.set_random_seed(11)
  model = make_model()
  optimizer = make_optimizer()
  losses = []
  for _ in range(_EPOCHS):
    for x, y in _dataset(rows):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(_losses(model, x, y, True))
      gradients = tape.gradient(loss, model.trainable_variables)
      optimizer.apply(gradients, model.trainable_variables)
      losses.append(loss.numpy())
  return model, losses


def _distributed_loop(
  strategy,
  rows,
  make_model,
  make_optimizer,
  weighting,
  scale_loss,
  function_on='outside',
):
  """The loop of TensorFlow's guide, with the wrapped optimizer."""
  keras.backend.clear_session()
  keras.utils.set_random_seed(11)
  with strategy.scope():
    model = make_model()
    optimizer = tfs.keras.DistributedOptimizer(
      make_optimizer(), weighting=weighting
    )
  batches = strategy.experimental_distribute_dataset(_dataset(rows))

  def replica_step(x, y, size):
    with tf.GradientTape() as tape:
      losses = _losses(model, x, y, True)
      if weighting == 'rows':
        loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
      else:
        loss = tf.reduce_sum(losses) / tf.cast(size, tf.float32)
      if scale_loss:
        loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return tf.reduce_sum(losses)

  if function_on == 'inside':
    replica_step = tf.function(replica_step)

  def step(x, y, size):
    total = strategy.run(replica_step, args=(x, y, size))
    return strategy.reduce('SUM', total, axis=None)

  if function_on == 'outside':
    step = tf.function(step)

  losses = []
  for _ in range(_EPOCHS):
    for x, y in batches:
      size = sum(v.shape[0] for v in strategy.experimental_local_results(x))
      losses.append((step(x, y, tf.constant(size)) / size).numpy())
  return model, losses


_RING, _CENTRAL = harness.STRATEGIES


class CustomLoopTest(harness.ConformanceTest, parameterized.TestCase):
  def assert_result(
    self, case, rows=_ROWS, make_model=None, make_optimizer=None, **kw
  ):
    make_model = make_model or harness.conv_model
    make_optimizer = make_optimizer or harness.momentum
    expected, want = _one_device_loop(rows, make_model, make_optimizer)
    strategy = case.create()
    actual, got = _distributed_loop(
      strategy, rows, make_model, make_optimizer, **kw
    )
    self.assertLen(want, _EPOCHS * -(-rows // 32))
    # The sum of the replicas' losses: a rowless one must add exactly nothing.
    self.assertAllClose(want, got, 1e-6, 1e-6)
    for a, b in zip(expected.get_weights(), actual.get_weights(), strict=True):
      self.assertAllClose(a, b, 0, 1e-6)
    self.assertGreaterEqual(self.num_reductions(strategy), len(want))

  @tiers.parameters(
    # Rows, weighting, scale_loss.
    tiers.soak(_RING, 69, 'rows', True),
    tiers.smoke(_RING, 65, 'rows', True),
    (_RING, 69, 'rows', False),
    tiers.soak(_RING, 65, 'rows', False),
    (_RING, 69, 'none', False),
    tiers.soak(_RING, 65, 'none', False),
    tiers.soak(_CENTRAL, 69, 'rows', True),
    tiers.soak(_CENTRAL, 65, 'rows', True),
    tiers.soak(_CENTRAL, 69, 'rows', False),
    tiers.soak(_CENTRAL, 65, 'rows', False),
    tiers.soak(_CENTRAL, 69, 'none', False),
    tiers.smoke(_CENTRAL, 65, 'none', False),
  )
  def test_equals_one_device(self, case, rows, weighting, scale_loss):
    self.assert_result(case, rows, weighting=weighting, scale_loss=scale_loss)

  @tiers.product(
    case=(_RING, tiers.soak(_CENTRAL)), function_on=('inside', 'nowhere')
  )
  def test_function_inside_run_and_eager(self, case, function_on):
    self.assert_result(
      case, weighting='rows', scale_loss=True, function_on=function_on
    )

  @tiers.named_parameters(*harness.every(tiers.soak))
  def test_synchronized_batch_normalization(self, case):
    self.assert_result(
      case, make_model=_sync_bn_model, weighting='rows', scale_loss=True
    )

  @tiers.named_parameters(*harness.every(tiers.soak))
  def test_clipping_and_accumulation(self, case):
    self.assert_result(
      case,
      make_optimizer=lambda: keras.optimizers.Adam(
        1e-2, gradient_accumulation_steps=2, global_clipnorm=0.05
      ),
      weighting='rows',
      scale_loss=True,
    )

  @tiers.named_parameters(*harness.every())
  def test_predictions_of_uneven_batches_keep_their_rows(self, case):
    strategy = case.create()
    with strategy.scope():
      model = harness.conv_model()
    x, _ = harness.images(34)  # 32 rows, then 2 rows for 4 replicas.
    batches = strategy.experimental_distribute_dataset(
      tf.data.Dataset.from_tensor_slices(x).batch(32)
    )

    @tf.function
    def predict(batch):
      return strategy.run(lambda b: model(b, training=False), args=(batch,))

    parts = []
    for batch in batches:
      parts += strategy.experimental_local_results(predict(batch))
    self.assertAllClose(
      np.concatenate([p.numpy() for p in parts]), model(x), 1e-6, 1e-6
    )


if __name__ == '__main__':
  tf.test.main()
