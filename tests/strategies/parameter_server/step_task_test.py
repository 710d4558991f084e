"""A step is applied once, and its numbers are there when somebody reads them."""

import types

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tests.strategies.parameter_server import fakes
from tf_strategies.strategies.parameter_server import (
  batch_message,
  step_task,
  traced_step,
)


class StepTaskTest(absltest.TestCase):
  def test_numbers_of_a_loop_outlive_a_write_of_the_coordinator(self):
    def function(worker, argument, slots):
      return numbers

    numbers = tf.constant([3.0], tf.float64)
    function.layout = None
    function.traced = types.SimpleNamespace(
      outputs=traced_step.Outputs(tf.TensorSpec([]))
    )
    engine = types.SimpleNamespace(
      function=lambda step, layout: function,
      apply_function_of=lambda task: 'the function that applies it',
      apply=lambda function, tasks: numbers,
      started=lambda step, worker: None,
      take_slots=lambda layout: None,
    )
    sent = step_task.Sent(batch_message.Batch(np.zeros([2])))
    task = step_task.StepTask(engine, step_task.Step(run=None), sent)
    pool, _ = fakes.pool(self, 1)
    reports = step_task.Reports(pool, fakes.Recovery().with_recovery)
    found = reports.of(task)
    task.run(0)
    reports.add(task)
    reports.forget()
    self.assertEqual(float(found), 3.0)


if __name__ == '__main__':
  absltest.main()
