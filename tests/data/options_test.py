import dataclasses

import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import options as options_lib

PipelineOptions = options_lib.PipelineOptions

# Option: (values outside its range).
_BAD = {
  'global_batch_size': (0, 1.5, None),
  'shuffle_buffer': (-1, 2.0),
  'seed': (-1, 2**63),
  'cache': ('disk', np.array(['none', 'memory'])),
  'drop_remainder': (1, None),
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

  def test_is_frozen_and_replace_validates(self):
    options = PipelineOptions(global_batch_size=8)
    with self.assertRaises(dataclasses.FrozenInstanceError):
      options.seed = 3
    with self.assertRaisesRegex(errors.UnsupportedOptionError, 'seed=-3'):
      dataclasses.replace(options, seed=-3)


if __name__ == '__main__':
  tf.test.main()
