"""A step is applied once, and its numbers are there when somebody reads them."""

import types

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tests.strategies.parameter_server import fakes
from tf_strategies.strategies.parameter_server import batch_message, traced_step
from tf_strategies.strategies.parameter_server import engine as engine_lib


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
    sent = engine_lib.Sent(batch_message.Batch(np.zeros([2])))
    task = engine_lib.StepTask(engine, engine_lib.Step(run=None), sent)
    pool, _ = fakes.pool(self, 1)
    reports = engine_lib.Reports(pool, fakes.Recovery().with_recovery)
    found = reports.of(task)
    task.run(0)
    reports.add(task)
    reports.forget()
    self.assertEqual(float(found), 3.0)


if __name__ == '__main__':
  absltest.main()
