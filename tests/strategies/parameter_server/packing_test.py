"""Packed tensors arrive with all their bits, whatever their types."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tests.strategies.parameter_server import arrays
from tf_strategies.strategies.parameter_server import packing

virtual_devices.configure()

_SHAPES = ((), (1,), (0,), (3, 0, 2), (2, 3), (5,), (1, 1, 1, 7))


def _through_a_message(sent):
  """Packs arrays into a message, and returns the arrays that a graph unpacks."""

  @tf.function(autograph=False)
  def run(*tensors):
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
    packed = packing.Packing(specs)
    return packed.unpack(packed.pack(tensors))

  return [t.numpy() for t in run(*map(tf.constant, sent))]


class PackingTest(tf.test.TestCase, parameterized.TestCase):
  @pytest.mark.smoke
  def test_all_dtypes_in_few_messages(self):
    sent = [
      arrays.random(dtype, shape, 10 * i + j)
      for i, dtype in enumerate(arrays.DTYPES)
      for j, shape in enumerate(_SHAPES)
    ]
    # A signalling NaN, numbers below the normal ones, and -0.0.
    words = [0x7FA00001, 0xFFC12345, 1, 0x80000001, 0x80000000]
    sent.append(np.array(words, np.uint32).view(np.float32))
    sent.append(np.array(words, np.uint64) << 32)
    arrays.assert_same_bits(self, sent, _through_a_message(sent))
    packed = packing.Packing([tf.TensorSpec(a.shape, a.dtype) for a in sent])
    messages = packed.pack([tf.constant(a) for a in sent])
    # Words of 32 and 64 bits travel together, each smaller type by itself.
    small = sum(np.dtype(d).itemsize < 4 for d in arrays.DTYPES)
    self.assertLen(messages, small + 1)
    self.assertEqual({m.shape.rank for m in messages}, {1})
    specs = [tf.TensorSpec(m.shape, m.dtype) for m in messages]
    self.assertEqual(packed.specs, specs)


class SendTest(tf.test.TestCase, parameterized.TestCase):
  def test_small_constant_integers(self):
    # Read as float32, they are numbers that TensorFlow's threads take for zero.
    sent = [1, np.int64(2), np.array([3, 4], np.int32)]

    @tf.function(autograph=False)
    def send(x):
      tensors = [*map(tf.constant, sent), x, 2 * x]
      packed = packing.Packing(
        [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
      )
      messages = packed.pack(tensors)
      with tf.device('CPU:1'):
        return packed.unpack(messages)

    received = []

    @tf.function(autograph=False)
    def in_a_thread_of_tensorflow():
      def call():
        received.extend(t.numpy() for t in send(tf.constant(1.0)))
        return 0

      return tf.py_function(call, [], tf.int32)

    in_a_thread_of_tensorflow()
    for value, found in zip([*sent, 1.0, 2.0], received, strict=True):
      self.assertAllEqual(found, value)


if __name__ == '__main__':
  tf.test.main()
