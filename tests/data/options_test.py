import dataclasses

import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import options as options_lib

PipelineOptions = options_lib.PipelineOptions

# Option: (values outside its range).
_BAD = {
  'global_batch_size': (0, -1, 1.5, '32', None, True),
  'shuffle_buffer': (-1, 2.0, 'all', True),
  'seed': (-1, 2**63, 0.5, '7', False),
  'cache': ('disk', '', None, True, ['none'], np.array(['none', 'memory'])),
  'drop_remainder': (0, 1, None, 'no'),
}
_GOOD = {
  'global_batch_size': (1, 60000, np.int64(8)),
  'shuffle_buffer': (None, 0, 1, 10**9),
  'seed': (None, 0, 2**63 - 1),
  'cache': ('none', 'memory'),
  'drop_remainder': (True, False),
}


class PipelineOptionsTest(tf.test.TestCase):
  def test_refuses(self):
    for name, values in _BAD.items():
      for value in values:
        with (
          self.subTest(name=name, value=value),
          self.assertRaises(errors.UnsupportedOptionError) as caught,
        ):
          PipelineOptions(**({'global_batch_size': 8} | {name: value}))
        self.assertEqual(caught.exception.received, f'{name}={value!r}')
        self.assertNotEmpty(caught.exception.expected)
        self.assertNotEmpty(caught.exception.fix)

  def test_accepts(self):
    for name, values in _GOOD.items():
      for value in values:
        options = PipelineOptions(**({'global_batch_size': 8} | {name: value}))
        self.assertEqual(getattr(options, name), value)

  def test_tables_cover_every_option(self):
    names = {f.name for f in dataclasses.fields(PipelineOptions)}
    self.assertEqual(set(_BAD), names)
    self.assertEqual(set(_GOOD), names)

  def test_is_frozen_and_replace_validates(self):
    options = PipelineOptions(global_batch_size=8)
    with self.assertRaises(dataclasses.FrozenInstanceError):
      options.seed = 3
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'seed=-3'):
      dataclasses.replace(options, seed=-3)


if __name__ == '__main__':
  tf.test.main()
