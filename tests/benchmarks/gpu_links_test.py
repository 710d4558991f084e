"""Constants come out of times that have them, and the best is named."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from benchmarks import gpu_links
from tf_strategies import collectives

SIZES = [4, 4096, 2**20, 2**28]


def row(num_devices, name, peer, median_ms, kind='ours'):
  return {
    'num_devices': num_devices,
    'set': name,
    'peer': peer,
    'kind': kind,
    'median_ms': median_ms,
  }


class FitTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters((10e-6, 1e-12), (2e-5, 1e-10), (1e-4, 0.0))
  def test_line(self, alpha, beta):
    seconds = [alpha + beta * size for size in SIZES]
    found = gpu_links.fit(SIZES, seconds)
    self.assertAllClose(found[0], alpha, 1e-6, 0)
    self.assertAllClose(found[1], beta, 1e-6, 1e-20)

  def test_small_sizes_count_as_much_as_large_ones(self):
    # Half a percent of the largest time is more than the whole of the smallest.
    sizes = [*SIZES[:-1], 2**27, 2**28]
    seconds = np.array([1e-5 + 1e-11 * size for size in sizes])
    seconds[-2:] *= 1.005, 0.995
    alpha, beta = gpu_links.fit(sizes, seconds)
    self.assertAllClose((alpha, beta), (1e-5, 1e-11), rtol=0.02, atol=0)

  def test_what_is_too_fast_to_measure_is_not_negative(self):
    for seconds in ([0.0] * 4, [1e-6, 2e-6, 1e-6, 0.0], [0.0, 0.0, 0.0, 1e-3]):
      found = gpu_links.fit(SIZES, seconds)
      self.assertAllGreaterEqual(found, 0.0)
      collectives.Link(*found)


class ChoicesTest(tf.test.TestCase):
  def test_best_is_named_for_each_set(self):
    results = [
      row(4, 'small', 'identity', 0.1, 'floor'),
      row(4, 'small', 'AutoAllReduce', 3.0),
      row(4, 'small', 'ring', 4.0),
      row(4, 'small', 'tree', 2.0),
      row(4, 'small', 'ReductionToOneDevice', 1.0, 'built_in'),
      row(4, 'large', 'AutoAllReduce', 5.0),
      row(4, 'large', 'ring', 10.0),
      row(4, 'large', 'tree', 20.0),
    ]
    small, large = gpu_links.choices(results)
    self.assertEqual(
      (small['set'], small['best'], small['auto_to_best']),
      ('small', 'tree', 1.5),
    )
    self.assertEqual(
      (large['set'], large['best'], large['auto_to_best']),
      ('large', 'ring', 0.5),
    )
    text = gpu_links.text({'copies': [], 'choices': [small, large]})
    self.assertIn('at most 1.50', text)
    self.assertRegex(text, r'\| small .*\| tree \|.* 4.00 \|  2.00 \|')

  def test_line_can_be_put_in(self):
    copy = {
      'link': 'one_gpu',
      'alpha_seconds': 1.25e-5,
      'beta_seconds_per_byte': 7.5e-13,
    }
    text = f'{{{gpu_links.line_of(copy)}}}'
    found = eval(text, {'collectives': collectives})
    self.assertAllClose(found['one_gpu'].alpha_seconds, 1.25e-5, rtol=0.1)
    self.assertAllClose(
      found['one_gpu'].beta_seconds_per_byte, 7.5e-13, 1e-3, 0
    )


if __name__ == '__main__':
  tf.test.main()
