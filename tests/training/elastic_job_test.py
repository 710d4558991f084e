"""How a job of one worker counts its steps, and calls `fit`."""

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies.training import elastic_job, elastic_options

virtual_devices.configure_logical_cpus()

_STEPS = 4


def _make_batches(epoch, step, epochs=3):
  rows = np.ones([2 * (epochs * _STEPS - epoch * _STEPS - step), 3], np.float32)
  return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(2)


class JobTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    strategy = tfs.MultiWorkerRingStrategy(devices=['CPU:0'])
    self.addCleanup(strategy.close)
    self.job = elastic_job.Job(elastic_options.ElasticOptions())
    self.job.begin(strategy)
    with strategy.scope():
      self.model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
      self.model.compile(
        tfs.keras.DistributedOptimizer('sgd'), 'mse', jit_compile=False
      )

  def _apply(self):
    """One step of a loop of one's own."""
    self.model.optimizer.iterations.assign_add(1)

  def test_steps_of_a_loop_count_once(self):
    self.job.restore(self.model)
    for step in range(5):
      self._apply()
      self.job.update(0, step + 1)
    self._apply()  # The worker hears of a death before it could tell.
    self.job.hold()
    self.assertEqual(self.job.step, 6)

  def test_loop_that_tells_before_it_restores(self):
    self.job.update(0, 1)
    self.job.hold()
    self.assertEqual(self.job.step, 1)


if __name__ == '__main__':
  tf.test.main()
