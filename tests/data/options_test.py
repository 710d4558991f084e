import ast
import dataclasses
import inspect

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tf_strategies import errors
from tf_strategies.data import options as options_lib

PipelineOptions = options_lib.PipelineOptions

# name -> values out of its range.
_BAD = {
  'global_batch_size': (0, -1, 1.5, '32', None, True),
  'shuffle_buffer': (-1, 2.0, 'all', True),
  'seed': (-1, 2**63, 0.5, '7', False),
  'num_parallel_calls': (0, -2, 1.0, None, True),
  'prefetch': (-2, 1.0, None, True),
  'cache': ('disk', '', None, True, ['none'], np.array(['none', 'memory'])),
  'autoshard': ('AUTO', '', None, 0, ['off'], np.array(['off', 'auto'])),
  'deterministic': (0, 1, None, 'yes'),
  'drop_remainder': (0, 1, None, 'no'),
  'repeat': (0, 3, None, 'yes'),
}
_GOOD = {
  'global_batch_size': (1, 60000, np.int64(8)),
  'shuffle_buffer': (None, 0, 1, 10**9),
  'seed': (None, 0, 2**63 - 1),
  'num_parallel_calls': (1, 64, tf.data.AUTOTUNE),
  'prefetch': (0, 1, tf.data.AUTOTUNE),
  'cache': ('none', 'memory'),
  'autoshard': ('off', 'auto', 'data', 'file'),
  'deterministic': (True, False),
  'drop_remainder': (True, False),
  'repeat': (True, False),
}


def _cases(table):
  return [
    (f'{name}_{i}', name, value)
    for name, values in table.items()
    for i, value in enumerate(values)
  ]


class PipelineOptionsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(_cases(_BAD))
  def test_refuses(self, name, value):
    with self.assertRaises(errors.UnsupportedOptionError) as caught:
      PipelineOptions(**({'global_batch_size': 8} | {name: value}))
    self.assertEqual(caught.exception.received, f'{name}={value!r}')
    self.assertNotEmpty(caught.exception.expected)
    self.assertNotEmpty(caught.exception.fix)

  @parameterized.named_parameters(_cases(_GOOD))
  def test_accepts(self, name, value):
    options = PipelineOptions(**({'global_batch_size': 8} | {name: value}))
    self.assertEqual(getattr(options, name), value)

  def test_tables_cover_every_option(self):
    names = {f.name for f in dataclasses.fields(PipelineOptions)}
    self.assertEqual(set(_BAD), names)
    self.assertEqual(set(_GOOD), names)

  def test_defaults_keep_every_example_and_the_order_repeatable(self):
    options = PipelineOptions(global_batch_size=8)
    self.assertIsNone(options.shuffle_buffer)
    self.assertTrue(options.deterministic)
    self.assertFalse(options.drop_remainder)
    self.assertFalse(options.repeat)
    self.assertEqual(options.num_parallel_calls, tf.data.AUTOTUNE)
    self.assertEqual(options.prefetch, tf.data.AUTOTUNE)

  def test_is_frozen_and_replace_validates(self):
    options = PipelineOptions(global_batch_size=8)
    with self.assertRaises(dataclasses.FrozenInstanceError):
      options.seed = 3
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'seed=-3'):
      dataclasses.replace(options, seed=-3)

  def test_error_is_a_value_error(self):
    with self.assertRaises(ValueError):
      PipelineOptions(global_batch_size=0)

  @pytest.mark.smoke
  def test_validates_without_tensorflow(self):
    tree = ast.parse(inspect.getsource(options_lib))
    imported = {
      alias.name.split('.')[0]
      for node in ast.walk(tree)
      if isinstance(node, ast.Import)
      for alias in node.names
    } | {
      node.module.split('.')[0]
      for node in ast.walk(tree)
      if isinstance(node, ast.ImportFrom)
    }
    self.assertNotIn('tensorflow', imported)
    self.assertEqual(options_lib.AUTOTUNE, tf.data.AUTOTUNE)


if __name__ == '__main__':
  tf.test.main()
