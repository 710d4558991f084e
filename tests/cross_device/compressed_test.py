"""A codec between devices: the simulator's bits, means, integers."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.cross_device import replicas
from tests.cross_device.replicas import MEAN, SUM
from tf_strategies import cross_device, errors
from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.collectives.codecs import CODECS
from tf_strategies.collectives.simulator import simulate

virtual_devices.configure()

WORLD_SIZE = 3
NAMES = replicas.devices(WORLD_SIZE)


def noise(length):
  random = np.random.default_rng(length)
  return random.normal(size=(WORLD_SIZE, length)).astype(np.float32)


class CompressedTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(
    algorithm=tuple(ALGORITHMS),
    compression=tuple(c for c in CODECS if c != 'none'),
    in_graph=(False, True),
  )
  def test_equals_the_simulator_call_after_call(
    self, algorithm, compression, in_graph
  ):
    op = cross_device.ScheduledAllReduce(algorithm, compression)
    ranks = noise(97)

    def step():
      value = replicas.on_devices(ranks, NAMES)
      return op.reduce(SUM, value, value).values

    step = tf.function(step) if in_graph else step
    schedule = ALGORITHMS[algorithm](WORLD_SIZE)
    expected = simulate(schedule, ranks, compression).outputs
    for _ in range(3):
      for result, simulated in zip(step(), expected, strict=True):
        self.assertEqual(result.numpy().tobytes(), simulated.tobytes())
    self.assertEqual(op.calls, 3)

  def test_mean_of_large_float16_does_not_overflow(self):
    op = cross_device.ScheduledAllReduce('ring', 'float16')
    ranks = np.full([WORLD_SIZE, 5], 60000, np.float32)
    value = replicas.on_devices(ranks, NAMES)
    for result in op.reduce(MEAN, value, value).values:
      self.assertAllClose(result, ranks[0], rtol=1e-3)

  def test_integers_stay_exact(self):
    op = cross_device.ScheduledAllReduce('ring', 'bfloat16')
    ranks = replicas.inputs('int32', (131,), WORLD_SIZE, MEAN)
    value = replicas.on_devices(ranks, NAMES)
    replicas.assert_equal(
      op.reduce(MEAN, value, value), replicas.exact(ranks, MEAN), NAMES
    )

  @pytest.mark.smoke
  def test_counts_the_bytes_of_payloads(self):
    for compression, factor in (('none', 4), ('bfloat16', 2)):
      op = cross_device.ScheduledAllReduce('tree', compression)
      value = replicas.on_devices(noise(64), NAMES)
      op.reduce(SUM, value, value)
      self.assertEqual(
        op.last_plan.bytes_in, (128 * factor, *[64 * factor] * 2)
      )

  @parameterized.parameters(('rung', 'none'), ('ring', 'zip'))
  def test_unknown_name(self, algorithm, compression):
    with self.assertRaisesRegex(errors.UnsupportedOptionError, "'.*ring|zip"):
      cross_device.ScheduledAllReduce(algorithm, compression)


if __name__ == '__main__':
  tf.test.main()
