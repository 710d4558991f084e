"""What moves in a collective: schedules and plans, without TensorFlow.

Example:

  >>> from tf_strategies import collectives
  >>> collectives.ALGORITHMS['ring'](4).validate().num_rounds
  6
"""

from tf_strategies.collectives.algorithms import ALGORITHMS
from tf_strategies.collectives.algorithms.direct import direct_all_reduce
from tf_strategies.collectives.algorithms.halving_doubling import (
  halving_doubling_all_reduce,
)
from tf_strategies.collectives.algorithms.hierarchical import (
  default_group_size,
  hierarchical_all_reduce,
)
from tf_strategies.collectives.algorithms.naive import naive_all_reduce
from tf_strategies.collectives.algorithms.one_shot import one_shot_all_reduce
from tf_strategies.collectives.algorithms.ring import ring_all_reduce
from tf_strategies.collectives.algorithms.tree import tree_all_reduce
from tf_strategies.collectives.bucketing import Bucket, plan_buckets
from tf_strategies.collectives.codec import Codec, Payload
from tf_strategies.collectives.codecs import CODECS
from tf_strategies.collectives.cost_model import Link, Topology, choose, cost
from tf_strategies.collectives.layout import Piece, chunk_loads, plan_layout
from tf_strategies.collectives.schedule import Schedule, Transfer, chunk_sizes
from tf_strategies.collectives.simulator import Simulation, simulate

__all__ = [
  'ALGORITHMS',
  'CODECS',
  'Bucket',
  'Codec',
  'Link',
  'Payload',
  'Piece',
  'Schedule',
  'Simulation',
  'Topology',
  'Transfer',
  'choose',
  'chunk_loads',
  'chunk_sizes',
  'cost',
  'default_group_size',
  'direct_all_reduce',
  'halving_doubling_all_reduce',
  'hierarchical_all_reduce',
  'naive_all_reduce',
  'one_shot_all_reduce',
  'plan_buckets',
  'plan_layout',
  'ring_all_reduce',
  'simulate',
  'tree_all_reduce',
]
