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
  def _task(self, spec, reported, **options):
    """A task of a step that returns `reported`; applying it adds to `applied`."""
    self.applied = []

    def function(worker, argument, slots):
      return reported

    function.layout = None
    function.traced = types.SimpleNamespace(outputs=traced_step.Outputs(spec))
    engine = types.SimpleNamespace(
      function=lambda step, layout: function,
      apply_function_of=lambda task: 'the function that applies it',
      apply=lambda function, tasks: self.applied.append(True) or reported,
      started=lambda step, worker: None,
      take_slots=lambda layout: None,
    )
    batch = batch_message.Batch(np.zeros([2]))
    step = step_task.Step(run=None)
    return step_task.StepTask(engine, step, step_task.Sent(batch), **options)

  def test_worker_that_is_lost_with_its_outputs_has_changed_nothing(self):
    """Checks that another one can compute the step again."""

    def lost():
      raise tf.errors.UnavailableError(None, None, 'the worker is gone')

    tensors = [types.SimpleNamespace(numpy=lost)]
    task = self._task(
      [tf.TensorSpec([300, 300])], tensors, is_result_wanted=True
    )
    with self.assertRaises(tf.errors.UnavailableError):
      task.run(0)
    self.assertEmpty(self.applied)

  def test_numbers_of_a_loop_outlive_a_write_of_the_coordinator(self):
    pool, _ = fakes.pool(self, 1)
    reports = step_task.Reports(pool, fakes.Recovery().with_recovery)
    task = self._task(tf.TensorSpec([]), tf.constant([3.0], tf.float64))
    found = reports.of(task)
    task.run(0)
    reports.add(task)
    reports.forget()
    self.assertEqual(float(found), 3.0)


if __name__ == '__main__':
  absltest.main()
