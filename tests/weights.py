"""Compares the variables of two runs."""

from collections.abc import Mapping

import numpy as np


def largest_difference(
  first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> tuple[float, str]:
  """Returns the largest difference of arrays of one name, and that name.

  A NaN in one of them is an infinite difference.
  """
  assert {*first} == {*second}, {*first} ^ {*second}
  found = (0.0, 'none')
  for name in first:
    one, other = (np.asarray(each[name], float) for each in (first, second))
    assert one.shape == other.shape, (name, one.shape, other.shape)
    delta = np.nan_to_num(np.abs(one - other), nan=np.inf)
    found = max(found, (float(np.max(delta, initial=0.0)), name))
  return found
