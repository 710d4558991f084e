"""The peers of `training_step`, with one device as the lower limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# The reference: MultiWorkerMirroredStrategy with fixes.
REFERENCE = 'collective'
WHOLE_BATCH = 'one_device_global_batch'

_MIB = 1 << 20
# Maximum relative difference between losses of the same steps.
_TOLERANCE, _COMPRESSED_TOLERANCE = 1e-3, 5e-2


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to train.

  Attributes:
    name: name in flags, tables and JSON.
    strategy: 'ring', 'collective', 'one_device', or 'apart' for workers that do not
      communicate. Peers with the same strategy share their processes.
    options: options of the strategy.
    whole_batch: whether it trains on the batch of all workers, not on a part.
    optimizer: name of the optimizer. Losses are compared by optimizer.
    local_steps: number of steps of `LocalSteps`, or 0 to train without it.
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
    """Returns the maximum relative difference between its losses and one device's."""
    return _TOLERANCE if self.compression == 'none' else _COMPRESSED_TOLERANCE


PEERS = (
  Peer('ring_1mb', 'ring', {'bucket_bytes': _MIB}),
  Peer('ring_8mb', 'ring', {'bucket_bytes': 8 * _MIB}),
  Peer('ring_64mb', 'ring', {'bucket_bytes': 64 * _MIB}),
  Peer('ring_8mb_bfloat16', 'ring', {'compression': 'bfloat16'}),
  Peer('ring_local_16', 'ring', local_steps=16),
  Peer('ring_local_64', 'ring', local_steps=64),
  # The state of Adam is on every worker, or sharded.
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
  """Compares the losses of all peers and ranks after the same steps.

  Args:
    losses: losses of each peer by rank.

  Raises:
    RuntimeError: if they differ, which invalidates the times.
  """
  first: dict[str, float] = {}
  if WHOLE_BATCH in losses:
    first['sgd'] = losses[WHOLE_BATCH][0]
  for peer in PEERS:
    if peer.name not in losses or not peer.whole_batch:
      continue
    if (
      peer.local_steps
    ):  # Its loss differs from other peers, but not between ranks.
      wanted, allowed = losses[peer.name][0], 0.0
    else:
      wanted = first.setdefault(peer.optimizer, losses[peer.name][0])
      allowed = peer.tolerance
    for rank, loss in enumerate(losses[peer.name]):
      # Also True for NaN.
      if not abs(loss - wanted) <= allowed * abs(wanted):
        raise RuntimeError(
          f'{peer.name}: rank {rank} has a loss of {loss}, not {wanted}. '
          'Its time would mean nothing.'
        )
