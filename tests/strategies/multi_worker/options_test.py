"""Options of several workers: what cannot be used is refused at once."""

import numpy as np
from absl.testing import absltest, parameterized

import tf_strategies as tfs

RING = tfs.RingOptions
COLLECTIVE = tfs.strategies.multi_worker.options.CollectiveOptions


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    (RING, 'link', 'udp'),
    (RING, 'link', np.array(['tcp', 'mpi'])),
    (RING, 'bucket_bytes', 0),
    (RING, 'bucket_bytes', True),
    (RING, 'all_reduce', 'rings'),
    (RING, 'all_reduce', ['ring']),
    (RING, 'compression', 'float8'),
    (RING, 'compression', np.array(['none', 'int8'])),
    (COLLECTIVE, 'communication', 'tcp'),
    (COLLECTIVE, 'communication', ['ring']),
    (COLLECTIVE, 'bucket_bytes', 1.5),
    (COLLECTIVE, 'max_subdivs_per_device', -2),
    (COLLECTIVE, 'max_subdivs_per_device', 2.0),
    (COLLECTIVE, 'start_timeout_seconds', -1),
    (COLLECTIVE, 'timeout_seconds', float('nan')),
    (COLLECTIVE, 'timeout_seconds', 10**400),
    (COLLECTIVE, 'timeout_seconds', None),
  )
  def test_unusable_value_is_refused(self, options, name, value):
    with self.assertRaises(tfs.errors.UnsupportedOptionError) as raised:
      options(**{name: value})
    for words in ('Expected', 'Fix'):
      self.assertIn(words, str(raised.exception))

  def test_defaults_and_what_numpy_counts_in(self):
    self.assertEqual(RING(bucket_bytes=np.int64(8 << 20)), RING())
    self.assertEqual(
      COLLECTIVE(max_subdivs_per_device=-1, timeout_seconds=np.float32(2)),
      COLLECTIVE(max_subdivs_per_device=-1, timeout_seconds=2.0),
    )


if __name__ == '__main__':
  absltest.main()
