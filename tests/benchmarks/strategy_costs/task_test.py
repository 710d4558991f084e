"""Measuring a task does not change its training, and times only its steps."""

import tensorflow as tf

from benchmarks.strategy_costs import task
from tests import tf_case, tiers, virtual_devices
from tests.examples import pages

virtual_devices.configure()

_OPTIONS = {
  'dataset': 'digits',
  'model': 'mlp',
  'global_batch_size': 64,
  'steps_per_epoch': 4,
  'epochs': 2,
  'verbose': False,
}


class TaskTest(tf_case.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(pages.flags_of_a_process())

  @tiers.parameters(tiers.soak('one_device'), 'ring_mirrored')
  def test_measured_task_trains_like_the_example(self, strategy):
    spec = task.Spec({**_OPTIONS, 'strategy': strategy}, 2, 3, '')
    expected = pages.run('mnist_keras_fit', *spec.flags())
    found = task.train(spec)
    # Equal in every bit, so the untimed steps were undone.
    self.assertEqual(found['test'], expected['test'])
    self.assertEqual(found['train'], expected['train'])
    self.assertEqual(found['iterations'], 8)
    self.assertEqual(found['steps'], 8)
    self.assertEqual(found['variable_bytes'], expected['variable_bytes'])
    # The rates are for 11 steps, not for 8.
    self.assertAllClose(
      found['bytes_per_step'], task.bytes_per_step(expected, 8), rtol=1e-3
    )
    self.assertEqual(
      [epoch['rows'] for epoch in found['timed_epochs']], [256, 256]
    )


if __name__ == '__main__':
  tf.test.main()
