"""What `training_step` measures: ways to train, and one device as the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# What all are compared with: MultiWorkerMirroredStrategy with the bugs cured.
REFERENCE = 'collective'
WHOLE_BATCH = 'one_device_global_batch'

_MIB = 1 << 20
# How far losses of the same steps may be apart, relatively.
_SAME, _SAME_IN_FEWER_BITS = 1e-3, 5e-2


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to train.

  Attributes:
    name: for flags, tables and JSON.
    strategy: 'ring', 'collective', 'one_device', or 'apart' for workers that do not
      meet; those of one strategy share their processes.
    options: of the strategy.
    whole_batch: whether the batch is that of all workers; a part otherwise.
    optimizer: its name. Losses of one optimizer are compared.
    local_steps: how many steps workers train apart; 0 for none.
  """

  name: str
  strategy: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  whole_batch: bool = True
  optimizer: str = 'sgd'
  local_steps: int = 0

  @property
  def compression(self) -> str:
    """Returns the name of the compression of gradients."""
    return self.options.get('compression', 'none')

  @property
  def tolerance(self) -> float:
    """Returns how far its losses may be from those of one device, relatively."""
    return _SAME if self.compression == 'none' else _SAME_IN_FEWER_BITS


PEERS = (
  Peer('ring_1mb', 'ring', {'bucket_bytes': _MIB}),
  Peer('ring_8mb', 'ring', {'bucket_bytes': 8 * _MIB}),
  Peer('ring_64mb', 'ring', {'bucket_bytes': 64 * _MIB}),
  Peer('ring_8mb_bfloat16', 'ring', {'compression': 'bfloat16'}),
  Peer('ring_local_16', 'ring', local_steps=16),
  Peer('ring_local_64', 'ring', local_steps=64),
  # State of its own for each weight, on every worker or divided among them.
  Peer('ring_adam', 'ring', optimizer='adam'),
  Peer(
    'ring_adam_sharded',
    'ring',
    {'shard_optimizer_state': True},
    optimizer='adam',
  ),
  Peer(REFERENCE, 'collective', {'max_subdivs_per_device': -1}),
  Peer('collective_8_parts', 'collective', {'max_subdivs_per_device': 8}),
  Peer(WHOLE_BATCH, 'one_device'),
  Peer('one_device_part', 'one_device', whole_batch=False),
  Peer('no_communication', 'apart', whole_batch=False),
)
NAMES = tuple(peer.name for peer in PEERS)


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
  """Compares what all peers and ranks have learned from the same steps.

  Args:
    losses: of each peer by rank.

  Raises:
    RuntimeError: they differ, so that the times would mean nothing.
  """
  first: dict[str, float] = {}
  if WHOLE_BATCH in losses:
    first['sgd'] = losses[WHOLE_BATCH][0]
  for peer in PEERS:
    if peer.name not in losses or not peer.whole_batch:
      continue
    if peer.local_steps:  # Other training, but one for all ranks.
      wanted, allowed = losses[peer.name][0], 0.0
    else:
      wanted = first.setdefault(peer.optimizer, losses[peer.name][0])
      allowed = peer.tolerance
    for rank, loss in enumerate(losses[peer.name]):
      # Not `>`: a NaN is wrong too.
      if not abs(loss - wanted) <= allowed * abs(wanted):
        raise RuntimeError(
          f'{peer.name}: rank {rank} has a loss of {loss}, not {wanted}. '
          'Its time would mean nothing.'
        )
