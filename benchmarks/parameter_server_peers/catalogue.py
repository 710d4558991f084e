"""Names of all peers and models. Does not import TensorFlow."""

from __future__ import annotations

import dataclasses

# The reference: TensorFlow's strategy with a custom loop.
REFERENCE = 'stock'

# The trained models. `models` builds them.
MODELS = ('cnn', 'mlp_25mb', 'layers_50', 'mlp_25mb_50')


@dataclasses.dataclass(frozen=True)
class Peer:
  """One way to train with parameter servers.

  Attributes:
    name: name in flags, tables and JSON.
    is_fit: whether it is Keras's `fit` under our strategy. Otherwise it is
      TensorFlow's `ClusterCoordinator`.
    is_fed: whether the coordinator reads the data and sends batches. Otherwise
      workers read the data.
  """

  name: str
  is_fit: bool = True
  is_fed: bool = True


PEERS = (
  Peer(REFERENCE, is_fit=False, is_fed=False),
  Peer('ours', is_fed=False),
  Peer('ours_fed'),
)
