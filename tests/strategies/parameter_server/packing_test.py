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
    return packing.unpack(packing.pack(tensors), specs)

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
    self.assert_same_bits(arrays, _through_a_message(arrays))
    messages = packing.pack([tf.constant(a) for a in arrays])
    # Words of 32 and 64 bits travel together, each smaller type by itself.
    small = sum(np.dtype(d).itemsize < 4 for d in _DTYPES)
    self.assertLen(messages, small + 1)
    self.assertEqual({m.shape.rank for m in messages}, {1})
    specs = packing.specs_of([tf.TensorSpec(a.shape, a.dtype) for a in arrays])
    self.assertEqual(specs, [tf.TensorSpec(m.shape, m.dtype) for m in messages])

  def test_bits_that_a_number_would_lose(self):
    signalling = np.array([0x7FA00001, 0xFFC12345], np.uint32).view(np.float32)
    subnormal = np.array([1, 0x80000001], np.uint32).view(np.float32)
    arrays = [
      signalling,
      subnormal,
      np.array([-0.0, np.inf, -np.inf], np.float32),
      np.array([2**53 + 1, -(2**63), 2**63 - 1], np.int64),
      np.array([0.1, 1e-320, -0.0]),
      np.array([2**64 - 1, 2**63], np.uint64),
    ]
    self.assert_same_bits(arrays, _through_a_message(arrays))


class IsSmallTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    ([0], tf.bool, True),
    ([packing.SMALL_BYTES // 4], tf.float32, True),
    ([packing.SMALL_BYTES // 4 + 1], tf.float32, False),
    ([None, 3], tf.float32, False),
    ([], tf.string, False),
    ([2], tf.complex64, False),
  )
  def test_is_small(self, shape, dtype, expected):
    self.assertEqual(packing.is_small(tf.TensorShape(shape), dtype), expected)


class SendTest(tf.test.TestCase, parameterized.TestCase):
  def test_order_is_kept_and_few_tensors_cross(self):
    big = packing.SMALL_BYTES // 4 + 1

    @tf.function(autograph=False)
    def run():
      with tf.device('CPU:0'):
        tensors = [
          tf.fill([big], 1.0),
          tf.constant(2.0),
          tf.constant([3, 4], tf.int64),
          tf.constant(True),
          tf.constant('text'),
          tf.constant([5.0]),
        ]
      return packing.send(tensors, 'CPU:1')

    sent = run()
    self.assertAllEqual(sent[0], np.ones(big))
    self.assertEqual(sent[1].numpy(), 2.0)
    self.assertAllEqual(sent[2], [3, 4])
    self.assertEqual(sent[3].numpy(), True)
    self.assertEqual(sent[4].numpy(), b'text')
    self.assertAllEqual(sent[5], [5.0])

    graph = run.get_concrete_function().graph
    messages = {
      tensor.name
      for op in graph.get_operations()
      if op.device.endswith('CPU:1')
      for tensor in op.inputs
      if tensor.op.type in ('ConcatV2', 'Identity')
      and not tensor.op.device.endswith('CPU:1')
    }
    # Words of a scalar and two vectors; the boolean, of one byte, is alone.
    self.assertLen(messages, 2)

  def test_small_constant_integers(self):
    # Read as float32, they are numbers that TensorFlow's threads take for zero.
    sent = [1, np.int64(2), np.array([3, 4], np.int32)]

    @tf.function(autograph=False)
    def send(x):
      first, *others = map(tf.constant, sent)
      return packing.send([first, x, *others, 2 * x], 'CPU:1')

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
