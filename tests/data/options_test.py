import numpy as np
import tensorflow as tf

from tf_strategies import errors
from tf_strategies.data import options as options_lib

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
          options_lib.PipelineOptions(
            **({'global_batch_size': 8} | {name: value})
          )
        self.assertEqual(caught.exception.received, f'{name}={value!r}')
        self.assertNotEmpty(caught.exception.expected)
        self.assertNotEmpty(caught.exception.fix)


if __name__ == '__main__':
  tf.test.main()
