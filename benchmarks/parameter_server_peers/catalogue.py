"""Every peer and every mode by name. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses

# What all are compared with: TensorFlow's strategy and a loop by hand.
REFERENCE = 'stock'

# The trained models, which `models` builds.
MODELS = ('cnn', 'mlp_25mb', 'layers_50', 'mlp_25mb_50')


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to train with parameter servers.

  Attributes:
    name: for flags, tables and JSON.
    is_fit: Keras's `fit` under ours; TensorFlow's `ClusterCoordinator` if not.
    is_fed: whether the coordinator reads the data and hands out batches;
      workers read them themselves otherwise.
  """

  name: str
  is_fit: bool = True
  is_fed: bool = True


PEERS = (
  Peer(REFERENCE, is_fit=False, is_fed=False),
  Peer('ours', is_fed=False),
  Peer('ours_fed'),
)
