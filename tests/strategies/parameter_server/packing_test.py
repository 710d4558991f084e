"""Packed tensors arrive with all their bits, whatever their types."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies.strategies.parameter_server import packing

virtual_devices.configure()

_DTYPES = (
  np.float32,
  np.float64,
  np.float16,
  ml_dtypes.bfloat16,
  np.int8,
  np.int16,
  np.int32,
  np.int64,
  np.uint8,
  np.uint16,
  np.uint32,
  np.uint64,
  np.bool_,
)
_SHAPES = ((), (1,), (0,), (3, 0, 2), (2, 3), (5,), (1, 1, 1, 7))


def _bits(array) -> bytes:
  return np.ascontiguousarray(array).tobytes()


def _random(dtype, shape, seed) -> np.ndarray:
  """Returns an array of random bits, NaNs included; a bool has only two values."""
  rng = np.random.default_rng(seed)
  if dtype == np.bool_:
    return rng.integers(0, 2, shape).astype(np.bool_)
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  flat = rng.integers(0, 256, size, np.uint8)
  return flat.view(dtype).reshape(shape)


def _through_a_message(arrays):
  """Packs arrays into a message, and returns the arrays that a graph unpacks."""

  @tf.function(autograph=False)
  def run(*tensors):
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
    packed = packing.Packing(specs)
    return packed.unpack(packed.pack(tensors))

  return [t.numpy() for t in run(*(tf.constant(a) for a in arrays))]


class PackingTest(tf.test.TestCase, parameterized.TestCase):
  def assert_same_bits(self, sent, received):
    self.assertLen(received, len(sent))
    for a, b in zip(sent, received, strict=True):
      self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
      self.assertEqual(_bits(a), _bits(b), a.dtype)

  @pytest.mark.smoke
  def test_all_dtypes_in_few_messages(self):
    arrays = [
      _random(dtype, shape, 10 * i + j)
      for i, dtype in enumerate(_DTYPES)
      for j, shape in enumerate(_SHAPES)
    ]
    # A signalling NaN, numbers below the normal ones, and -0.0.
    words = [0x7FA00001, 0xFFC12345, 1, 0x80000001, 0x80000000]
    arrays.append(np.array(words, np.uint32).view(np.float32))
    arrays.append(np.array(words, np.uint64) << 32)
    self.assert_same_bits(arrays, _through_a_message(arrays))
    packed = packing.Packing([tf.TensorSpec(a.shape, a.dtype) for a in arrays])
    messages = packed.pack([tf.constant(a) for a in arrays])
    # Words of 32 and 64 bits travel together, each smaller type by itself.
    small = sum(np.dtype(d).itemsize < 4 for d in _DTYPES)
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
      first, *others = map(tf.constant, sent)
      tensors = [first, x, *others, 2 * x]
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
    self.assertLen(received, 5)
    for value, found in zip(
      [sent[0], 1.0, *sent[1:], 2.0], received, strict=True
    ):
      self.assertAllEqual(found, value)


if __name__ == '__main__':
  tf.test.main()
