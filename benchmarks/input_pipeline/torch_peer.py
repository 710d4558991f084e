"""The DataLoader of PyTorch as a peer, without TensorFlow.

It runs in an interpreter with torch. The work is the same: shuffled uint8 images to
float32 in [0, 1], in batches. `batched` loads a whole batch by one index, which is
the fastest way of a DataLoader. Otherwise there is one call per example, and the
default collation.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks.input_pipeline import epoch

NAMES = ('torch_0', 'torch_2', 'torch_batched_0', 'torch_batched_2')


class Actor:
  """Holds a loader and measures it. `pool_worker` calls the methods.

  Args:
    rank: always 0.
  """

  def __init__(self, rank: int):
    del rank

  def open(self, variant: str, spec: dict[str, Any]) -> None:
    """Creates the loader.

    Args:
      variant: one of `NAMES`, with the number of workers.
      spec: see `actor.Actor.open`.
    """
    import torch
    from torch.utils import data

    images, labels = (
      torch.from_numpy(np.load(os.path.join(spec['arrays'], f'{name}.npy')))
      for name in ('images', 'labels')
    )

    class Examples(data.Dataset):
      """Maps an index, or a list of indices, to images and labels."""

      def __len__(self):
        return len(labels)

      def __getitem__(self, index):
        return images[index].to(torch.float32) / 255.0, labels[index]

    num_workers = int(variant.rpartition('_')[2])
    options = {
      'num_workers': num_workers,
      'persistent_workers': num_workers > 0,
    }
    examples = Examples()
    if '_batched_' in variant:
      batches = data.BatchSampler(
        data.RandomSampler(examples), spec['batch_size'], drop_last=False
      )
      options |= {'sampler': batches, 'batch_size': None}
    else:
      options |= {'batch_size': spec['batch_size'], 'shuffle': True}
    self._loader = data.DataLoader(examples, **options)

  def run(self, train_step_s: float) -> dict[str, float]:
    """Measures an epoch."""
    return epoch.run(self._loader, train_step_s, len)
