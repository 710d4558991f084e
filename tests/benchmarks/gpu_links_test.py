"""The fit finds the constants from which the times were computed."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from benchmarks import gpu_links
from tf_strategies.collectives import cost_model

SIZES = [4, 4096, 2**20, 2**28]


class FitTest(tf.test.TestCase, parameterized.TestCase):
  def test_small_sizes_count_as_much_as_large_ones(self):
    # Half a percent of the largest time exceeds the whole smallest time.
    sizes = [*SIZES[:-1], 2**27, 2**28]
    seconds = np.array([1e-5 + 1e-11 * size for size in sizes])
    seconds[-2:] *= 1.005, 0.995
    alpha, beta = gpu_links.fit(sizes, seconds)
    self.assertAllClose((alpha, beta), (1e-5, 1e-11), rtol=0.02, atol=0)

  def test_what_is_too_fast_to_measure_is_not_negative(self):
    for seconds in ([0.0] * 4, [1e-6, 2e-6, 1e-6, 0.0], [0.0, 0.0, 0.0, 1e-3]):
      found = gpu_links.fit(SIZES, seconds)
      self.assertAllGreaterEqual(found, 0.0)
      cost_model.Link(*found)


if __name__ == '__main__':
  tf.test.main()
