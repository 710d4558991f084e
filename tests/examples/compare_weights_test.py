import os

import numpy as np
from absl.testing import absltest

import tf_strategies as tfs
from examples import compare_weights


class CompareWeightsTest(absltest.TestCase):
  def _write(self, **variables):
    path = os.path.join(self.create_tempdir().full_path, 'weights.npz')
    np.savez(path, **variables)
    return path

  def test_exit_code_follows_the_largest_difference(self):
    start = np.arange(4.0)
    changed = start + [0.0, 0.0, -0.25, 0.0]
    first = self._write(a=start, b=start)
    second = self._write(a=start, b=changed)
    for limit, code in ((None, 0), (0.25, 0), (0.24, 2)):
      with self.subTest(limit):
        arguments = ['compare_weights', first, second]
        self.assertEqual(compare_weights.main(arguments, limit), code)

  def test_nan_is_an_infinite_difference(self):
    largest, _ = compare_weights.largest_difference(
      {'a': np.zeros(2)}, {'a': np.array([0.0, np.nan])}
    )
    self.assertEqual(largest, np.inf)

  def test_other_variables_are_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.CheckpointMismatchError, 'b is in one .*a has shapes'
    ):
      compare_weights.largest_difference(
        {'a': np.zeros(2), 'b': np.zeros(1)}, {'a': np.zeros(3)}
      )


if __name__ == '__main__':
  absltest.main()
