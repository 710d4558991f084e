"""A batch in one tensor: every array, every bit."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.strategies.parameter_server import arrays
from tf_strategies import errors
from tf_strategies.strategies.parameter_server import batch_message


class LayoutTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(*arrays.DTYPES)
  def test_every_dtype(self, dtype):
    shapes = ((2, 3), (), (0, 4), (17,), (4, 6))
    sent = [arrays.random(dtype, s, i) for i, s in enumerate(shapes)]
    sent[-1] = sent[-1].T
    batch = batch_message.Batch(sent)
    read = tf.function(batch.layout.read, autograph=False)
    found = [t.numpy() for t in read(tf.constant(batch.message()))]
    arrays.assert_same_bits(self, sent, found)
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


if __name__ == '__main__':
  tf.test.main()
