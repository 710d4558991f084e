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
_SAME, _SAME_IN_16_BITS = 1e-3, 5e-2


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to train.

  Attributes:
    name: for flags, tables and JSON.
    strategy: 'ring', 'collective' or 'one_device'; those of one strategy share
      their processes.
    options: of the strategy.
    whole_batch: whether the batch is that of all workers; a part otherwise.
    optimizer: its name. Losses of one optimizer are compared.
  """

  name: str
  strategy: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  whole_batch: bool = True
  optimizer: str = 'sgd'

  @property
  def compressed(self) -> bool:
    """Whether gradients travel in 16 bits."""
    return self.options.get('compression', 'none') != 'none'


PEERS = (
  Peer('ring_1mb', 'ring', {'bucket_bytes': _MIB}),
  Peer('ring_8mb', 'ring', {'bucket_bytes': 8 * _MIB}),
  Peer('ring_64mb', 'ring', {'bucket_bytes': 64 * _MIB}),
  Peer('ring_8mb_bfloat16', 'ring', {'compression': 'bfloat16'}),
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
    expected = first.setdefault(peer.optimizer, losses[peer.name][0])
    allowed = _SAME_IN_16_BITS if peer.compressed else _SAME
    for rank, loss in enumerate(losses[peer.name]):
      # Not `>`: a NaN is wrong too.
      if not abs(loss - expected) <= allowed * abs(expected):
        raise RuntimeError(
          f'{peer.name}: rank {rank} has a loss of {loss}, not {expected}. '
          'Its time would mean nothing.'
        )
