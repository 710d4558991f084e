"""Elastic jobs whose gradients are compressed: what is not sent is kept, once."""

import functools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests.fault_tolerance import elastic_program, elastic_test

_EPOCHS = 2
_EVERYONE = (0, 1, 2)


def _write_at_once(rank, *args):
  """A mutation: what is kept is written before the step is over."""
  from tf_strategies.strategies.multi_worker import worker_exchange

  add = worker_exchange.WorkerExchange.add

  def add_and_write(self, *args):
    writes, self._writes = self._writes, None
    sums = add(self, *args)
    self._writes = writes
    return sums

  worker_exchange.WorkerExchange.add = add_and_write
  return elastic_program.train(rank, *args)


@functools.cache
def _outcomes(compression, deaf=(), program=elastic_program.train):
  options = tfs.ElasticOptions(window_seconds=1, max_failures=1000)
  with elastic_test.Kill(
    options,
    0.0,
    _EPOCHS,
    # Of two optimizers the second one's gradients follow on the first one's.
    kind='two_optimizers',
    deaf=deaf,
    # More than a step has, which would fail for ever.
    deaf_every=41,
    compression=compression,
    program=program,
  ) as kill:
    return [outcome.result() for outcome in kill.workers.wait()]


class RepeatedStepTest(tf.test.TestCase, parameterized.TestCase):
  """Whole groups that fail in the middle of steps, and repeat them."""

  def assert_same_bits(self, found, expected):
    for one, other in zip(found, expected, strict=True):
      for a, b in zip(one['weights'], other['weights'], strict=True):
        np.testing.assert_array_equal(a, b)
      self.assertEqual(one['kept'].keys(), other['kept'].keys())
      for name, array in one['kept'].items():
        np.testing.assert_array_equal(array, other['kept'][name], name)

  def test_rests_are_added_once(self):
    undisturbed = _outcomes('int8')
    for found in undisturbed:
      self.assertLen(found['generations'], 1)
      self.assertNotEmpty(found['kept'])
      for name, array in found['kept'].items():
        self.assertGreater(np.abs(array).max(), 0, name)
    disturbed = _outcomes('int8', deaf=_EVERYONE)
    for found in disturbed:
      self.assertGreater(len(found['generations']), 4)
    self.assert_same_bits(disturbed, undisturbed)

  def test_writes_that_do_not_wait_add_rests_twice(self):
    mutant = _outcomes('int8', deaf=_EVERYONE, program=_write_at_once)
    with self.assertRaises(AssertionError):
      self.assert_same_bits(mutant, _outcomes('int8'))


class KillTest(tf.test.TestCase, parameterized.TestCase):
  def test_a_worker_dies_and_comes_back(self):
    options = tfs.ElasticOptions(min_workers=2, window_seconds=0.5)
    victim = 1
    with elastic_test.Kill(options, 0.15, compression='int8') as kill:
      kill.after(victim, 5)
      kill.workers.start(victim)
      outcomes = [outcome.result() for outcome in kill.workers.wait()]
    want, _ = elastic_program.uninterrupted()
    steps = elastic_program.EPOCHS * elastic_program.STEPS
    for found in outcomes:
      self.assertEqual(found['iterations'], steps)
      self.assertGreater(found['accuracy'], 0.97)
      for a, b, c in zip(
        found['weights'], outcomes[0]['weights'], want, strict=True
      ):
        np.testing.assert_array_equal(a, b)
        # Near one device's, which rounds nothing.
        self.assertLess(np.abs(a - c).max(), 0.1)
      for name, array in found['kept'].items():
        self.assertGreater(np.abs(array).max(), 0, name)
    self.assertEqual(outcomes[victim]['generations'][-1].world_size, 3)


if __name__ == '__main__':
  tf.test.main()
