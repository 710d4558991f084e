"""Every peer and every mode by name. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# What all are compared with: TensorFlow's strategy and a loop by hand.
REFERENCE = 'stock'

# What is trained; `models` builds them.
MODELS = ('cnn', 'mlp_25mb', 'layers_50', 'mlp_25mb_50')
# In the working directory of each worker: how long a model that pauses waits
# there in each step.
PAUSE_FILE = 'pause_microseconds'


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to train with parameter servers.

  Attributes:
    name: for flags, tables and JSON.
    is_fit: Keras's `fit` under ours; TensorFlow's `ClusterCoordinator` if not.
    is_fed: whether the coordinator reads the data and hands out batches;
      workers read them themselves otherwise.
    options: of our strategy.
  """

  name: str
  is_fit: bool = True
  is_fed: bool = True
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def shares_batches(self) -> bool:
    """Whether all workers compute one step together, on shares of its batch."""
    return self.options.get('mode') == 'sync'


PEERS = (
  Peer(REFERENCE, is_fit=False, is_fed=False),
  Peer('ours', is_fed=False),
  Peer('ours_fed'),
)
# What is compared when one worker is slow.
MODES = (
  Peer('async'),
  Peer('sync', options={'mode': 'sync'}),
  Peer('sync_backup_1', options={'mode': 'sync', 'backup_workers': 1}),
  Peer('bounded_4', options={'mode': 'bounded', 'max_staleness': 4}),
)
