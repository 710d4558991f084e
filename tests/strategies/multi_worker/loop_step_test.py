"""A loop that calls `strategy.step` on several workers gives one device's results."""

import keras
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tests.strategies import loop_programs

virtual_devices.configure()


def _work(rank, name, devices, programs):
  del rank
  strategy = tfs.create_strategy(name, devices=virtual_devices.names(devices))
  found = [
    loop_programs.run(getattr(loop_programs, program), strategy)
    for program in programs
  ]
  strategy.close()
  return found


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


class LoopStepTest(tf.test.TestCase, parameterized.TestCase):
  @tiers.named_parameters(
    ('ring', 'multi_worker_ring', 2, ('clipped_and_accumulated', 'normalised')),
    tiers.soak(
      'all_programs',
      'multi_worker_ring',
      1,
      tuple(program.__name__ for program in loop_programs.PROGRAMS),
    ),
    tiers.soak('collective', 'multi_worker_collective', 1, ('normalised',)),
  )
  def test_equals_one_device(self, name, devices, programs):
    results = processes.run_workers(_work, 2, args=(name, devices, programs))
    for i, program in enumerate(programs):
      program = getattr(loop_programs, program)
      want = tf.nest.flatten(loop_programs.run(program))
      for found in results:
        for a, b in zip(want, tf.nest.flatten(found[i]), strict=True):
          self.assertAllClose(a, b, 1e-5, 1e-6)

  def test_run_with_one_device_a_worker_reduces_in_a_branch(self):
    found = processes.run_workers(_apply_in_branch, 2)
    self.assertEqual(found, [[-6.0]] * 2)


if __name__ == '__main__':
  tf.test.main()
