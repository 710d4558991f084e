"""Arrays of any structure and dtype can be a source."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import data as data_lib
from tf_strategies import errors


class ArraysTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ('list', [np.arange(5) * 10, np.arange(5)], lambda b: b[0].tolist()),
    (
      'dict',
      {'a': np.arange(5) * 10, 'b': np.array(list('abcde'))},
      lambda b: b['a'].tolist(),
    ),
  )
  def test_any_structure_is_a_source(self, components, read):
    options = data_lib.PipelineOptions(3, seed=1)
    for training in (False, True):
      dataset = data_lib.make_dataset(components, options, training=training)
      found = [row for b in dataset.as_numpy_iterator() for row in read(b)]
      if not training:
        self.assertEqual(found, [0, 10, 20, 30, 40])
      self.assertCountEqual(found, [0, 10, 20, 30, 40])

  @pytest.mark.smoke
  def test_decode_fn_runs_after_a_cached_prepare_fn(self):
    source = data_lib.Arrays(
      {'x': np.arange(4, dtype=np.uint8)},
      decode_fn=lambda batch: tf.cast(batch['x'], tf.float32) / 2,
    )
    options = data_lib.PipelineOptions(4, cache='memory')
    dataset = data_lib.make_dataset(
      source,
      options,
      training=False,
      prepare_fn=lambda batch: {'x': batch['x'] + 1},
      map_fn=lambda x: (x, -x),
    )
    ((x, y),) = dataset.as_numpy_iterator()
    self.assertEqual(x.tolist(), [0.5, 1, 1.5, 2])
    self.assertEqual(y.tolist(), [-0.5, -1, -1.5, -2])

  @parameterized.named_parameters(
    ('lengths', (np.arange(3), np.arange(2)), r'\[3, 2\]'),
    ('no_rows', np.zeros([0, 2]), r'\[0\]'),
    ('scalar', np.zeros([]), r'\[None\]'),
  )
  def test_refuses(self, components, message):
    with self.assertRaisesRegex(errors.DataError, message):
      data_lib.Arrays(components)


if __name__ == '__main__':
  tf.test.main()
