"""A batch in one tensor, and packed tensors, keep every array and every bit."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import virtual_devices
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import batch_message, packing

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


def _random(dtype, shape, seed) -> np.ndarray:
  """Returns an array of random bits, including NaNs. A bool has only two values."""
  rng = np.random.default_rng(seed)
  if dtype == np.bool_:
    return rng.integers(0, 2, shape).astype(np.bool_)
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  flat = rng.integers(0, 256, size, np.uint8)
  return flat.view(dtype).reshape(shape)


def _assert_same_bits(test, sent, received) -> None:
  """Checks that two sequences have arrays of the same shapes, types and bits."""
  test.assertLen(received, len(sent))
  for a, b in zip(sent, received, strict=True):
    test.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
    test.assertEqual(a.tobytes(), b.tobytes(), a.dtype)


class LayoutTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*_DTYPES)
  def test_every_dtype_is_read_back(self, dtype):
    shapes = ((2, 3), (), (0, 4), (17,), (4, 6))
    sent = [_random(dtype, s, i) for i, s in enumerate(shapes)]
    sent[-1] = sent[-1].T
    batch = batch_message.Batch(sent)
    read = tf.function(batch.layout.read, autograph=False)
    found = [t.numpy() for t in read(tf.constant(batch.message()))]
    _assert_same_bits(self, sent, found)
    # Writing the elements one by one would need more bytes.
    array = np.full(1000, 0xFF).astype(dtype)
    [message] = batch_message.Batch([array]).message()
    self.assertLess(len(message) - array.nbytes, 20)
    self.assertIn(array.tobytes(), message)

  def test_too_large_array_is_refused(self):
    array = np.broadcast_to(np.float32(0), [2**29])
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, '2147483648 bytes.*smaller batches'
    ):
      batch_message.Batch([array]).message()

  def test_strings_and_tensors_of_varying_size(self):
    """Checks that all batches have one layout, so that the step is traced once."""
    words = ('', 'blue\0', 'gr\u00fcn', 'red')
    layouts = []

    @tf.function(autograph=False)
    def read(message):
      found = layouts[0].read(message)
      self.assertEqual(found[0]['t'].shape.as_list(), [None, 2])
      self.assertEqual(found[0]['s'].shape.as_list(), [None, 3])
      return found

    for k in range(3):
      ragged = tf.ragged.constant(
        [[[1.0] * k, []], [[2.0, 3.0]]], ragged_rank=2, dtype=tf.float32
      )
      dense = np.eye(2, 3, k, np.float32)
      text = np.roll(np.array(words, object), k).reshape(2, 2)
      data = {'r': ragged, 's': tf.sparse.from_dense(dense), 't': text}
      flags = np.array([k == 0, True])
      batch = batch_message.Batch((data, flags, None), hides_rows=True)
      layouts.append(batch.layout)
      found, *others = read(tf.constant(batch.message()))
      self.assertAllEqual(found['r'], ragged)
      self.assertAllEqual(tf.sparse.to_dense(found['s']), dense)
      self.assertAllEqual(found['t'], tf.constant(text))
      self.assertAllEqual(others[0], flags)
      self.assertIsNone(others[1])
    self.assertLen({layout.key for layout in layouts}, 1)

  def test_microbatches_are_the_shares_of_workers(self):
    numbers = np.eye(5, 3, dtype=np.float32)
    text = np.array(list('abcde'))
    parts = batch_message.Batch((numbers, None, text)).microbatches(2)
    found = [batch_message.pack(p.structure, p.arrays) for p in parts]
    self.assertAllEqual(np.concatenate([f[0] for f in found]), numbers)
    self.assertEqual([f[1] for f in found], [None, None])
    self.assertEqual([''.join(f[2]) for f in found], ['abc', 'de'])

  def test_python_objects_are_refused(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'Python objects.*numbers or strings'
    ):
      batch_message.Batch(np.array([{}, None]))

  def test_layout_keys_are_unique(self):
    x, y = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
    keys = [
      batch_message.Batch(data).layout.key
      for data in (
        (x, y),
        (y, x),
        (x, y, None),
        (x, x),
        (x[:1], y),
        {'a': x, 'b': y},
        {'a': x, 'c': y},
        [x, y],
      )
    ]
    self.assertLen(set(keys), len(keys))
    again = batch_message.Batch((x + 1, y + 1))
    self.assertEqual(again.layout.key, keys[0])


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
      _random(dtype, shape, 10 * i + j)
      for i, dtype in enumerate(_DTYPES)
      for j, shape in enumerate(_SHAPES)
    ]
    # A signaling NaN, subnormal numbers, and -0.0.
    words = [0x7FA00001, 0xFFC12345, 1, 0x80000001, 0x80000000]
    sent.append(np.array(words, np.uint32).view(np.float32))
    sent.append(np.array(words, np.uint64) << 32)
    _assert_same_bits(self, sent, _through_a_message(sent))
    packed = packing.Packing([tf.TensorSpec(a.shape, a.dtype) for a in sent])
    messages = packed.pack([tf.constant(a) for a in sent])
    self.assertLen(messages, 1)
    self.assertEqual({m.shape.rank for m in messages}, {1})
    specs = [tf.TensorSpec(m.shape, m.dtype) for m in messages]
    self.assertEqual(packed.specs, specs)

  def test_vectors_of_unknown_length(self):
    """Checks that numbers of rows travel with small tensors, and rows alone."""
    specs = [
      tf.TensorSpec(shape, dtype)
      for shape, dtype in (
        ([None], tf.int32),
        ([None, 2], tf.float32),
        ([3], tf.float32),
        ([None], tf.int64),
      )
    ]
    packed = packing.Packing(specs)

    @tf.function(input_signature=specs, autograph=False)
    def run(*tensors):
      messages = packed.pack(tensors)
      self.assertLen(messages, 2)
      return packed.unpack(messages)

    # The message is copied once.
    operations = run.get_concrete_function().graph.get_operations()
    self.assertLen([op for op in operations if op.type == 'SplitV'], 1)
    for first, second in ((0, 5), (7, 0), (4, 4), (0, 0)):
      sent = [
        _random(np.int32, [first], 1),
        _random(np.float32, [second, 2], 2),
        _random(np.float32, [3], 3),
        _random(np.int64, [second], 4),
      ]
      found = [t.numpy() for t in run(*map(tf.constant, sent))]
      _assert_same_bits(self, sent, found)


if __name__ == '__main__':
  tf.test.main()
