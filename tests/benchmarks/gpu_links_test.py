"""The fit finds the constants from which the times were computed."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from benchmarks import gpu_links
from tf_strategies.collectives import cost_model

SIZES = [4, 4096, 2**20, 2**28]


class FitTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters((10e-6, 1e-12), (2e-5, 1e-10), (1e-4, 0.0))
  def test_line(self, alpha, beta):
    seconds = [alpha + beta * size for size in SIZES]
    found = gpu_links.fit(SIZES, seconds)
    self.assertAllClose(found[0], alpha, 1e-6, 0)
    self.assertAllClose(found[1], beta, 1e-6, 1e-20)

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


class LineTest(tf.test.TestCase):
  def test_line_can_be_put_in(self):
    line = gpu_links._line('one_gpu', 1.25e-5, 7.5e-13)
    found = eval(f'{{{line}}}', {'cost_model': cost_model})
    self.assertAllClose(found['one_gpu'].alpha_seconds, 1.25e-5, rtol=0.1)
    self.assertAllClose(
      found['one_gpu'].beta_seconds_per_byte, 7.5e-13, 1e-3, 0
    )


if __name__ == '__main__':
  tf.test.main()
