"""Plain BatchNormalization normalises by all rows of the batch, as on one device.

`fit_test` compares whole models. Here: its moving statistics are those of all rows on
every replica (and so what is saved), and rowless replicas leave no NaN behind.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers
from tests.conformance import harness
from tests.conformance.harness import Feature


def _model():
  return harness.conv_model(keras.layers.BatchNormalization(momentum=0.5))


def _statistics_model():
  return keras.Sequential(
    [
      keras.layers.Input([1]),
      keras.layers.BatchNormalization(momentum=0.5, center=False, scale=False),
      keras.layers.Dense(1),
    ]
  )


class BatchNormalizationTest(harness.ConformanceTest, parameterized.TestCase):
  @tiers.product(
    [
      {'case': harness.STRATEGIES[0]},
      {'case': harness.STRATEGIES[1]},
    ],
    [tiers.soak({'rows': 96}), tiers.soak({'rows': 69}), {'rows': 65}],
  )
  def test_trains_with_one_state_and_without_nan(self, case, rows):
    feature = Feature('plain', rows=rows, model=_model)
    result = harness.train(feature, case.create(), epochs=4)
    losses = result.history['loss']
    self.assertAllInRange(losses, 0.0, 10.0)
    self.assertLess(losses[-1], losses[0])
    for weight in result.weights:
      self.assertTrue(np.isfinite(weight).all())
    self.assertTrue(np.isfinite(result.predictions).all())
    self.assert_replicas_equal(result.model)

  @tiers.named_parameters(*harness.every())
  def test_moving_statistics_are_those_of_all_rows(self, case):
    strategy = case.create()
    model = harness.build(
      Feature(
        'statistics',
        model=_statistics_model,
        compile={'loss': 'mse', 'metrics': []},
      ),
      strategy,
    )
    # Replica i holds rows around 10 * i: its own mean and variance differ.
    x = np.concatenate(
      [10.0 * i + (i + 1) * np.linspace(-1, 1, 8) for i in range(4)]
    ).astype(np.float32)[:, None]
    model.fit(x, x, batch_size=32, epochs=1, shuffle=False, verbose=0)
    layer = model.layers[0]
    want_mean, want_variance = 0.5 * x.mean(), 0.5 * 1.0 + 0.5 * x.var()
    for copy in layer.moving_mean.value.values:
      self.assertAllClose(copy.numpy(), [want_mean], 1e-5)
    for copy in layer.moving_variance.value.values:
      self.assertAllClose(copy.numpy(), [want_variance], 1e-5)

  @tiers.named_parameters(*harness.every())
  def test_rowless_replicas_do_not_move_the_statistics(self, case):
    model = harness.build(
      Feature(
        'statistics',
        model=_statistics_model,
        compile={'loss': 'mse', 'metrics': []},
      ),
      case.create(),
    )
    x = np.array([[6.0]], np.float32)  # One row: three replicas have none.
    model.fit(x, x, batch_size=32, epochs=1, verbose=0)
    for copy in model.layers[0].moving_mean.value.values:
      self.assertAllClose(copy.numpy(), [3.0])


if __name__ == '__main__':
  tf.test.main()
