"""Gloo of torch. Runs in an environment without TensorFlow."""

from __future__ import annotations

import datetime
import os

import numpy as np
import torch

from benchmarks.process_peers import base


class Gloo(base.Peer):
  """`torch.distributed.all_reduce`, in place on clones."""

  def __init__(self, seat: base.Seat):
    super().__init__(seat)
    # The default is the interface of the host's name.
    os.environ['GLOO_SOCKET_IFNAME'] = seat.interface
    torch.distributed.init_process_group(
      'gloo',
      init_method=f'tcp://{seat.addresses[0]}',
      rank=seat.rank,
      world_size=seat.world_size,
      timeout=datetime.timedelta(seconds=seat.timeout_seconds),
    )

  def prepare(self) -> None:
    """See base class."""
    self._input = torch.from_numpy(
      base.input_value(self.seat.rank, self.num_elements)
    )
    self._clones = []

  def before(self, calls: int) -> None:
    """See base class."""
    self._clones = [self._input.clone() for _ in range(calls)]

  def barrier(self) -> None:
    """See base class."""
    torch.distributed.barrier()

  def call(self) -> torch.Tensor:
    """See base class."""
    tensor = self._clones.pop()
    torch.distributed.all_reduce(tensor)
    return tensor

  def result(self, returned: torch.Tensor) -> np.ndarray:
    """See base class."""
    return returned.numpy()

  def release(self) -> None:
    """See base class."""
    self._input = None
    self._clones = []
