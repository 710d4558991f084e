"""Models saved under a strategy load on one device, and vice versa."""

import keras
import numpy as np
import tensorflow as tf

from tests import tf_case, tiers, virtual_devices
from tests.programs import common
from tests.programs.cases import STRATEGIES

virtual_devices.configure()

_DATA = common.images(69)
_CASES = (STRATEGIES[0], tiers.soak(STRATEGIES[1]))


def _build(strategy=None):
  keras.backend.clear_session()
  keras.utils.set_random_seed(11)
  with common.scope_of(strategy):
    model = common.compiled()
    model.optimizer.build(model.trainable_variables)
  return model


class SavingTest(tf_case.TestCase):
  def assert_same_state(self, expected, actual):
    """Checks that weights and optimizer state are equal in all copies."""
    for want, got in zip(_variables(expected), _variables(actual), strict=True):
      np.testing.assert_array_equal(want.numpy(), got.numpy(), want.path)
      for copy in getattr(got.value, 'values', ()):
        np.testing.assert_array_equal(want.numpy(), copy.numpy(), want.path)
    self.assertGreater(actual.optimizer.iterations.numpy(), 0)

  @tiers.product(case=_CASES)
  def test_weights_and_checkpoints_load_on_one_and_several_devices(self, case):
    many, one = _build(case.create()), _build()
    common.fit(many, *_DATA)
    weights = self.path('x.weights.h5')
    many.save_weights(weights)
    one.load_weights(weights)
    self.assert_same_state(many, one)
    one.save_weights(weights)
    again, other = _build(case.create()), _build(case.create())
    again.load_weights(weights)
    self.assert_same_state(one, again)
    path = tf.train.Checkpoint(model=many).save(self.path('c'))
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    self.assert_same_state(many, other)


def _variables(model):
  return [*model.variables, *model.optimizer.variables]


if __name__ == '__main__':
  tf.test.main()
