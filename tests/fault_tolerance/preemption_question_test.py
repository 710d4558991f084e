"""How often workers ask each other whether one of them was signalled."""

import types
from unittest import mock

from absl.testing import absltest

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies.fault_tolerance import preemption

virtual_devices.configure()


class _Workers:
  """Two workers that always say the same."""

  rank, world_size = 0, 2

  def __init__(self):
    self.asked = 0

  def combine(self, tensor, op, name):
    del op, name
    self.asked += 1
    return tensor


class QuestionTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.now = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: self.now)
    self.enterContext(mock.patch.object(preemption, 'time', clock))
    self.workers = _Workers()
    checkpoint = mock.Mock(tfs.RunCheckpoint)
    checkpoint.strategy = mock.Mock()
    checkpoint.strategy.extended.communicator = self.workers
    self.preemption = preemption.Preemption(checkpoint, check_seconds=2.0)

  def _steps(self, count, seconds):
    for _ in range(count):
      self.now += seconds
      self.assertFalse(self.preemption.requested)

  def _asks_in(self, count, seconds):
    before = self.workers.asked
    self._steps(count, seconds)
    return self.workers.asked - before

  def test_asks_at_the_pace_of_steps(self):
    self._steps(10, 0.5)
    self.assertEqual(self._asks_in(12, 0.5), 3)

  def test_question_at_the_end_of_an_epoch_is_no_step(self):
    self._steps(9, 0.5)
    for _ in range(3):
      self.now += 0.001
      self.preemption.is_requested(at_once=True)
    self.assertEqual(self._asks_in(12, 0.5), 3)

  def test_question_at_once_before_any_step(self):
    self.preemption.is_requested(at_once=True)
    self.assertEqual(self._asks_in(1, 0.5), 1)

  def test_batches_of_an_evaluation_are_no_steps(self):
    self._steps(9, 0.5)
    callback = preemption.PreemptionCheckpoint.__new__(
      preemption.PreemptionCheckpoint
    )
    callback._preemption = self.preemption
    before = self.workers.asked
    for batch in range(400):
      self.now += 0.01
      callback.on_test_batch_end(batch)
    # Whoever is signalled while it lasts is heard of, too.
    self.assertBetween(self.workers.asked - before, 2, 4)
    self.assertBetween(self._asks_in(12, 0.5), 3, 4)


if __name__ == '__main__':
  absltest.main()
