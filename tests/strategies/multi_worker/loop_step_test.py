"""A loop that calls `strategy.step` on several workers gives one device's results."""

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


if __name__ == '__main__':
  tf.test.main()
