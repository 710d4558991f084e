"""A batch in one tensor: every array, every bit."""

import ml_dtypes
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import errors
from tf_strategies.strategies.parameter_server import batch_message

_DTYPES = (
  np.float32,
  np.float64,
  np.float16,
  ml_dtypes.bfloat16,
  np.int8,
  np.int32,
  np.int64,
  np.uint8,
  np.uint16,
  np.bool_,
)


def _structure(arrays):
  return tf.nest.map_structure(
    lambda a: (
      None if a is None else tf.TensorSpec(a.shape, tf.as_dtype(a.dtype))
    ),
    arrays,
  )


def _array(dtype, shape, start=0):
  """Values that tell positions and arrays apart."""
  size = int(np.prod(shape))
  if dtype == np.bool_:
    return (np.arange(size) % 3 == start % 3).reshape(shape)
  return (np.arange(size) + start).astype(dtype).reshape(shape)


class LayoutTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*_DTYPES)
  def test_every_dtype(self, dtype):
    shapes = ((2, 3), (), (0, 4), (17,))
    batch = batch_message.Batch(
      [
        *[_array(dtype, s, i) for i, s in enumerate(shapes)],
        _array(dtype, (4, 6)).T,
      ]
    )
    read = tf.function(batch.layout.read, autograph=False)
    found = [t.numpy() for t in read(tf.constant(batch.message()))]
    for want, got in zip(batch.arrays, found, strict=True):
      self.assertEqual((want.shape, want.dtype), (got.shape, got.dtype))
      self.assertEqual(want.tobytes(), got.tobytes())
    # Elements that are written one by one would need more bytes.
    array = np.full(1000, 0xFF).astype(dtype)
    [message] = batch_message.Batch([array]).message()
    self.assertLess(len(message) - array.nbytes, 20)
    self.assertIn(array.tobytes(), message)

  def test_array_that_is_too_large(self):
    array = np.broadcast_to(np.float32(0), [2**29])
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, '2147483648 bytes.*smaller batches'
    ):
      batch_message.Batch([array]).message()

  def test_strings_and_tensors_whose_sizes_differ(self):
    """Checks that all batches have one layout, so that the step is traced once."""
    words = ('', 'blue\0', 'gr\u00fcn', 'red')
    batches = []
    for k in range(3):
      ragged = tf.ragged.constant(
        [[[1.0] * k, []], [[2.0, 3.0]]], ragged_rank=2, dtype=tf.float32
      )
      dense = np.zeros([2, 3], np.float32)
      dense[0, : k + 1] = np.arange(1, k + 2)
      text = np.roll(np.array(words, object), k).reshape(2, 2)
      flags = np.array([k == 0, True])
      data = {'r': ragged, 's': tf.sparse.from_dense(dense), 't': text}
      batches.append(batch_message.Batch((data, flags, None), hides_rows=True))
    layout = batches[0].layout

    @tf.function(autograph=False)
    def run(message):
      found = layout.read(message)
      self.assertEqual(found[0]['t'].shape.as_list(), [None, 2])
      self.assertEqual(found[0]['s'].shape.as_list(), [None, 3])
      return found[:2]

    for batch in batches:
      self.assertEqual(batch.layout.key, layout.key)
      found = run(tf.constant(batch.message()))
      want = batch_message.pack(batch.structure, batch.arrays)
      self.assertIsNone(want[2])
      self.assertEqual(found[0]['r'].to_list(), want[0]['r'].to_list())
      self.assertAllEqual(
        *(tf.sparse.to_dense(d[0]['s']) for d in (found, want))
      )
      text = [tf.compat.as_bytes(w) for w in want[0]['t'].reshape(-1)]
      self.assertEqual(found[0]['t'].numpy().reshape(-1).tolist(), text)
      self.assertAllEqual(found[1], want[1])

  def test_microbatches(self):
    """Checks that they are the shares of several workers."""
    numbers = np.eye(5, 3, dtype=np.float32)
    text = np.array(list('abcde'))
    parts = batch_message.Batch((numbers, None, text)).microbatches(2)
    found = [batch_message.pack(p.structure, p.arrays) for p in parts]
    self.assertAllEqual(np.concatenate([f[0] for f in found]), numbers)
    self.assertEqual([f[1] for f in found], [None, None])
    self.assertEqual([''.join(f[2]) for f in found], ['abc', 'de'])

  def test_objects_are_refused(self):
    with self.assertRaisesRegex(
      errors.UnsupportedOptionError, 'Python objects.*numbers or strings'
    ):
      batch_message.Batch(np.array([{}, None]))

  def test_key_tells_layouts_apart(self):
    x, y = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
    layouts = [
      batch_message.BatchLayout(_structure(structure))
      for structure in (
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
    self.assertLen({layout.key for layout in layouts}, len(layouts))
    again = batch_message.BatchLayout(_structure((x + 1, y + 1)))
    self.assertEqual(again.key, layouts[0].key)


if __name__ == '__main__':
  tf.test.main()
