"""A variant of tf.data in its own process."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.input_pipeline import epoch, timeline, variants
from examples.datasets import images as images_lib


class Actor:
  """Holds a dataset and measures it. `pool_worker` calls the methods.

  Args:
    rank: always 0.
  """

  def __init__(self, rank: int):
    del rank

  def open(self, variant: str, spec: dict[str, Any]) -> None:
    """Builds the variant.

    Args:
      variant: one of `variants.NAMES`.
      spec: fields of `variants.Source`; 'arrays' is a directory with images.npy
        and labels.npy.
    """
    if spec.get('arrays'):
      images, labels = (
        np.load(os.path.join(spec['arrays'], f'{name}.npy'))
        for name in ('images', 'labels')
      )
      spec = {**spec, 'arrays': images_lib.Images(images, labels)}
    self._dataset = variants.build(variant, variants.Source(**spec))

  def run(self, train_step_s: float) -> dict[str, float]:
    """Measures an epoch."""
    return epoch.run(self._dataset, train_step_s, num_rows)

  def timeline(
    self, train_step_s: float, num_steps: int, prefetch: bool
  ) -> dict[str, Any]:
    """Records the first steps, and returns the fields of a `Timeline`."""
    found = timeline.record(self._dataset, train_step_s, num_steps, prefetch)
    return dataclasses.asdict(found)


def num_rows(batch: Any) -> int:
  """Returns the length of the first component of a batch, or 1 for a scalar."""
  components = tf.nest.flatten(batch, expand_composites=True)
  if not components or components[0].shape.rank == 0:
    return 1
  return int(components[0].shape[0])
