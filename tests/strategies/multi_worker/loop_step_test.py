"""A worker with one device may reduce in a branch."""

import keras
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices

virtual_devices.configure()


def _apply_in_branch(rank):
  strategy = tfs.create_strategy(
    'multi_worker_ring', devices=virtual_devices.names(1)
  )
  with strategy.scope():
    variable, optimizer = keras.Variable([0.0]), keras.optimizers.SGD(1.0)

  def apply():
    optimizer.apply([tf.constant([rank + 1.0])], [variable])
    return 0

  @tf.function
  def step(flag):
    strategy.run(lambda: tf.cond(flag, apply, lambda: 0))

  for flag in (True, False, True):
    step(tf.constant(flag))
  strategy.close()
  return variable.numpy().tolist()


class LoopStepTest(tf.test.TestCase):
  def test_run_with_one_device_a_worker_reduces_in_a_branch(self):
    found = processes.run_workers(_apply_in_branch, 2)
    self.assertEqual(found, [[-6.0]] * 2)


if __name__ == '__main__':
  tf.test.main()
