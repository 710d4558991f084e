"""Elastic jobs with compressed gradients: each residual is kept and added once."""

import functools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests.fault_tolerance import elastic_program, elastic_test

_EPOCHS = 2
_EVERYONE = (0, 1, 2)


@functools.cache
def _outcomes(deaf=()):
  # Two workers would round other shares of the gradient than three.
  options = tfs.ElasticOptions(min_workers=3, max_failures=1000)
  # Of two optimizers the second one's gradients follow on the first one's. A worker
  # is deaf after more collectives than a step has, which would fail for ever.
  arguments = 'two_optimizers', elastic_program.BATCH, deaf, 'int8', 41
  with elastic_test.workers(options, 0.0, _EPOCHS, *arguments) as job:
    return [outcome.result() for outcome in job.processes.wait()]


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
    undisturbed = _outcomes()
    for found in undisturbed:
      self.assertLen(found['generations'], 1)
      self.assertNotEmpty(found['kept'])
      for name, array in found['kept'].items():
        self.assertGreater(np.abs(array).max(), 0, name)
    disturbed = _outcomes(_EVERYONE)
    for found in disturbed:
      self.assertGreater(len(found['generations']), 4)
      self.assertEqual({g.world_size for g in found['generations']}, {3})
    self.assert_same_bits(disturbed, undisturbed)


if __name__ == '__main__':
  tf.test.main()
