"""The DataLoader of PyTorch as a peer; a script that needs no TensorFlow.

It runs in whatever interpreter has torch, by its path, and answers as
`child` does: a line of JSON for each line of JSON. The work is the same:
shuffled uint8 images to float32 in [0, 1], in batches. `batched` loads a whole
batch by one index, which is the fastest way a DataLoader has; without it there
is a call an example and the default collation.

Example:

  >>> from benchmarks.input_pipeline import torch_peer
  >>> torch_peer.parse('torch_batched_2')
  {'batched': True, 'num_workers': 2}
"""

import json
import os
import sys
import time

NAMES = ('torch_0', 'torch_2', 'torch_batched_0', 'torch_batched_2')


def parse(name):
  """What a variant's name says: batched or not, and how many workers."""
  return {
    'batched': '_batched_' in name,
    'num_workers': int(name.rpartition('_')[2]),
  }


def make_loader(images, labels, batch_size, batched, num_workers):
  """A DataLoader over arrays: images uint8 [n, ...], labels int64 [n]."""
  import torch
  from torch.utils import data

  images, labels = torch.from_numpy(images), torch.from_numpy(labels)

  class Examples(data.Dataset):
    """An index, or a list of them, to images and labels."""

    def __len__(self):
      return len(labels)

    def __getitem__(self, index):
      return images[index].to(torch.float32) / 255.0, labels[index]

  options = {'num_workers': num_workers, 'persistent_workers': num_workers > 0}
  if not batched:
    return data.DataLoader(
      Examples(), batch_size=batch_size, shuffle=True, **options
    )
  batches = data.BatchSampler(
    data.RandomSampler(Examples()), batch_size, drop_last=False
  )
  return data.DataLoader(
    Examples(), sampler=batches, batch_size=None, **options
  )


def run(loader, train_step_s):
  """An epoch, as `epoch.run`."""
  start = asked = time.perf_counter()
  first = fetch = 0.0
  steps = items = 0
  iterator = iter(loader)
  while (batch := next(iterator, None)) is not None:
    waited = time.perf_counter() - asked
    first = waited if not steps else first
    fetch += waited
    steps += 1
    items += len(batch[0])
    del batch
    if train_step_s:
      time.sleep(train_step_s)
    asked = time.perf_counter()
  return {
    'seconds': time.perf_counter() - start,
    'first_batch_s': first,
    'fetch_s': fetch,
    'num_steps': steps,
    'num_items': items,
  }


def main():
  """Answers until its input ends."""
  answers = os.fdopen(os.dup(1), 'w', buffering=1)
  # What a library prints must not be taken for an answer.
  os.dup2(2, 1)
  loader = None
  for line in sys.stdin:
    request = json.loads(line)
    try:
      if request['do'] == 'open':
        import numpy as np

        spec = request['spec']
        loader = make_loader(
          np.load(os.path.join(spec['arrays'], 'images.npy')),
          np.load(os.path.join(spec['arrays'], 'labels.npy')),
          spec['batch_size'],
          **parse(spec['variant']),
        )
        answer = {}
      elif request['do'] == 'run':
        answer = run(loader, request['train_step_s'])
      else:
        answer = None  # No model of its stages.
      said = {'value': answer}
    except Exception as e:
      said = {'error': f'{type(e).__name__}: {e}'}
    answers.write(json.dumps(said) + '\n')


if __name__ == '__main__':
  main()
