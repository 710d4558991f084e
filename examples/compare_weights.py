"""Compares the weights that two runs wrote with --save_weights.

Twenty steps on one device and on four, then the largest difference:

  python -m examples.mnist_keras_fit --strategy=one_device --dataset=digits \\
    --epochs=1 --steps_per_epoch=20 --save_weights=one.npz
  python -m examples.mnist_keras_fit --strategy=ring_mirrored \\
    --num_virtual_devices=4 --dataset=digits --epochs=1 --steps_per_epoch=20 \\
    --save_weights=four.npz
  python -m examples.compare_weights one.npz four.npz --max_difference=1e-5

Exit codes: 0; 1 if a file cannot be used or the two hold different variables;
2 if a difference is larger than --max_difference.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np
from absl import app, flags

import tf_strategies as tfs


def largest_difference(
  first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> tuple[float, str]:
  """Returns the largest difference of two sets of variables, and in which.

  A NaN in one of them is an infinite difference.

  Raises:
    CheckpointMismatchError: other names or shapes; the message has them.

  Example:

    >>> largest_difference({'a': np.zeros(2)}, {'a': np.array([0.0, -0.5])})
    (0.5, 'a')
  """
  differences = [
    f'{name} is in one of them only' for name in sorted({*first} ^ {*second})
  ]
  differences += [
    f'{name} has shapes {first[name].shape} and {second[name].shape}'
    for name in first
    if name in second and first[name].shape != second[name].shape
  ]
  if differences:
    raise tfs.errors.CheckpointMismatchError(
      f'the variables cannot be compared: {"; ".join(differences)}. Pass two '
      'files of one model and optimizer.'
    )
  found = (0.0, 'none')
  for name in first:
    delta = np.abs(first[name].astype(float) - second[name].astype(float))
    largest = float(np.max(np.nan_to_num(delta, nan=np.inf), initial=0.0))
    found = max(found, (largest, name))
  return found


def read(path: str) -> dict[str, np.ndarray]:
  """Reads an .npz file of variables.

  Raises:
    DataError: it is missing or no such file.
  """
  try:
    with np.load(path) as archive:
      return dict(archive)
  except (OSError, ValueError, zipfile.BadZipFile) as e:
    raise tfs.errors.DataError(
      f'{path}: cannot be read ({e}); expected an .npz file from --save_weights'
    ) from e


def main(argv: Sequence[str], max_difference: float | None = None) -> int:
  """Prints the largest difference; returns the exit code."""
  if len(argv) != 3:
    raise app.UsageError('expected two .npz files')
  try:
    largest, name = largest_difference(read(argv[1]), read(argv[2]))
  except tfs.errors.Error as e:
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return 1
  print(f'Largest difference: {largest:.3g}, in {name}.')
  if max_difference is not None and largest > max_difference:
    print(f'Larger than --max_difference={max_difference}.', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  MAX_DIFFERENCE = flags.DEFINE_float(
    'max_difference', None, 'Exit with code 2 if a difference is larger.'
  )
  app.run(lambda argv: main(argv, MAX_DIFFERENCE.value))
