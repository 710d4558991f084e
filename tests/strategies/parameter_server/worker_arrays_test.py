"""Large arrays of data set functions are arguments, and copied to workers once."""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies.strategies.parameter_server import input

virtual_devices.configure()

_ROWS = 40_000
_SMALL = np.arange(3, dtype=np.float32)


def _slices(x, first):
  return tf.data.Dataset.from_tensor_slices((x, -x)).skip(first).batch(2)


def _gathered(x, first):
  rows = tf.data.Dataset.range(first, _ROWS).batch(2)
  return rows.map(lambda i: (tf.gather(x, i), -tf.gather(x, i)))


class ArraysTest(tf.test.TestCase, parameterized.TestCase):
  def _function(self, arrays, dataset, x):
    def make(first):
      made = dataset(x, first).map(lambda a, b: (a, b, _SMALL))
      return tf.data.experimental.to_variant(made)

    return arrays.function(make, [tf.TensorSpec([], tf.int64)])

  def _first_batch(self, function, spec):
    # Where a worker's input is: TensorFlow has no data sets on GPUs.
    with tf.device(virtual_devices.HOST):
      variant = function(tf.constant(5, tf.int64))
      return next(iter(tf.data.experimental.from_variant(variant, spec)))

  @parameterized.parameters(_slices, _gathered)
  def test_function_has_no_large_constant(self, dataset):
    x = np.arange(_ROWS, dtype=np.float32)
    function, tensors = self._function(input.WorkerArrays(), dataset, x)
    self.assertNotEmpty(tensors)
    self.assertLess(function.graph.as_graph_def().ByteSize(), x.nbytes / 4)
    spec = dataset(x, 0).element_spec + (tf.TensorSpec([3]),)
    a, b, small = self._first_batch(function, spec)
    self.assertAllEqual(a, x[5:7])
    self.assertAllEqual(b, -x[5:7])
    self.assertAllEqual(small, _SMALL)

  def test_function_that_makes_other_arrays_each_time(self):
    """Checks that each trace uses the arrays that its own call made."""
    rng = np.random.default_rng(0)
    seen = []

    def dataset(x, first):
      seen.append(rng.normal(size=_ROWS).astype(np.float32))
      return _slices(seen[-1], first)

    function, _ = self._function(input.WorkerArrays(), dataset, None)
    spec = _slices(seen[0], 0).element_spec + (tf.TensorSpec([3]),)
    a, *_ = self._first_batch(function, spec)
    self.assertAllEqual(a, seen[-1][5:7])

  def test_array_that_changes_is_another_array_after_it_is_gone(self):
    arrays, found = input.WorkerArrays(), []
    for value in (1.0, 2.0):
      x = np.full([_ROWS], value, np.float32)
      _, (tensor, *_) = self._function(arrays, _slices, x)
      found.append(float(tensor[0]))
      del x
    self.assertEqual(found, [1.0, 2.0])

  def test_worker_gets_a_copy_for_each_token(self):
    arrays, tensor = input.WorkerArrays(), tf.zeros([3])
    with mock.patch.object(input, 'device', lambda worker: '/device:CPU:0'):
      a, again, b, c = (
        arrays.on_worker([tensor], worker, token)[0]
        for worker, token in ((0, 7), (0, 7), (1, 7), (0, 9))
      )
    self.assertIs(a, again)
    self.assertLen({id(each) for each in (a, b, c)}, 3)


if __name__ == '__main__':
  tf.test.main()
