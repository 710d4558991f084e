"""A worker of `slow_links` with PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import (
  default_hooks,
)

from benchmarks import slow_link_task as task


class Actor:
  """One worker; `pool_worker` calls the methods.

  Args:
    rank: of this worker.
  """

  def __init__(self, rank: int):
    self._rank = rank

  def train(
    self,
    addresses: Sequence[str],
    data_path: str,
    global_batch_size: int,
    steps: int,
    seed: int,
    options: Mapping[str, Any],
  ) -> dict[str, object]:
    """As `slow_link_ours`; the one option is `bfloat16`."""
    os.environ['GLOO_SOCKET_IFNAME'] = 'eth0'
    torch.set_num_threads(1)
    size = len(addresses)
    torch.distributed.init_process_group(
      'gloo',
      init_method=f'tcp://{addresses[0]}',
      rank=self._rank,
      world_size=size,
      timeout=datetime.timedelta(seconds=120),
    )
    images = task.Images(data_path, global_batch_size, seed)
    torch.manual_seed(seed)
    layers, width = [], images.x.shape[1]
    for units in task.HIDDEN:
      layers += [torch.nn.Linear(width, units), torch.nn.ReLU()]
      width = units
    net = torch.nn.Sequential(*layers, torch.nn.Linear(width, task.CLASSES))
    model = torch.nn.parallel.DistributedDataParallel(net)
    if options.get('bfloat16'):
      model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.Adam(net.parameters(), task.LEARNING_RATE)
    loss_of = torch.nn.CrossEntropyLoss()
    x, y = torch.from_numpy(images.x), torch.from_numpy(images.y)
    part = global_batch_size // size
    mine = slice(part * self._rank, part * (self._rank + 1))
    rows = torch.from_numpy(images.batches(steps)[:, mine])

    def step(chosen):
      optimizer.zero_grad()
      loss_of(model(x[chosen]), y[chosen]).backward()
      optimizer.step()

    def weights():
      return [p.detach().numpy().T for p in net.parameters()]

    step(rows[0])
    clock = task.Clock(images, weights)
    for chosen in rows:
      step(chosen)
      clock.tick()
    torch.distributed.destroy_process_group()
    return clock.report()
