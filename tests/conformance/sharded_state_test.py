"""The conformance table where devices divide the state of optimizers."""

import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tests.conformance import harness, multi_worker

pytestmark = pytest.mark.soak


class ShardedStateTest(harness.ConformanceTest, parameterized.TestCase):
  @parameterized.named_parameters(
    *((name, feature) for name, feature in multi_worker.features().items())
  )
  def test_equals_one_device(self, feature):
    strategy = tfs.create_strategy(
      'ring_mirrored',
      devices=virtual_devices.names(3),
      shard_optimizer_state=True,
    )
    expected = harness.train(feature)
    actual = harness.train(feature, strategy)
    self.assert_results(expected, actual, feature.tolerance)


if __name__ == '__main__':
  tf.test.main()
