"""Time of a schedule on a topology, and the cheapest schedule for a size.

The alpha-beta model of Thakur, Rabenseifner and Gropp (2005): a message of m
bytes takes `alpha + m beta` seconds, and additions take no time. A rank sends
one message and receives one at a time, both at once (full duplex). Ranks of a
group, such as a host, share its link to the other groups: there the bytes
of all of them count.
"""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tf_strategies.collectives import algorithms
from tf_strategies.collectives import schedule as schedule_lib

# Algorithms that are compared by default, the preferred first. A new algorithm is not
# added by itself: it must not change programs that did not ask for it.
CANDIDATES = (
  'ring',
  'halving_doubling',
  'tree',
  'hierarchical',
  'direct',
  'naive',
)
# Costs that differ by less than this, relatively, are a tie: closed formulas
# that are equal must not be told apart by the rounding of a sum.
_TIE = 1e-9


class Link(NamedTuple):
  """The cost of one message.

  Example:

    >>> Link(alpha_seconds=1.0, beta_seconds_per_byte=0.5).seconds(4)
    3.0

  Attributes:
    alpha_seconds: latency of a message.
    beta_seconds_per_byte: inverse of the bandwidth.
  """

  alpha_seconds: float
  beta_seconds_per_byte: float

  def seconds(self, num_bytes: float) -> float:
    """Returns the time of one message of `num_bytes`."""
    return self.alpha_seconds + num_bytes * self.beta_seconds_per_byte


class Topology(NamedTuple):
  """The groups of near ranks, and the costs of their links.

  Example:

    >>> near, far = Link(1e-6, 1e-10), Link(5e-5, 1e-9)
    >>> hosts = Topology(8, intra=near, inter=far, group_size=4)
    >>> hosts.is_near(0, 3), hosts.is_near(3, 4)
    (True, False)

  Attributes:
    world_size: number of ranks.
    intra: the link between ranks of one group; between all without groups.
    inter: the link of a group to the others, which its ranks share; None without
      groups.
    group_size: consecutive ranks in a group (the last group may be smaller),
      None without groups.
  """

  world_size: int
  intra: Link
  inter: Link | None = None
  group_size: int | None = None

  def is_near(self, src: int, dst: int) -> bool:
    """Returns whether both are in one group, or there are no groups."""
    size = self.group_size
    return size is None or src // size == dst // size


def cost(
  schedule: schedule_lib.Schedule,
  num_bytes: int,
  topology: Topology,
) -> float:
  """Returns the modelled time of one all-reduce.

  Chunks that one rank sends to another in the same round are one message. A
  round takes as long as its busiest rank: the sum of its sends, or that of its
  receives, whichever is longer; or as the busiest link of a group,
  which carries the bytes of all its ranks.

  Example:

    >>> from tf_strategies.collectives.algorithms import ring
    >>> mesh = Topology(4, Link(1.0, 0.5))
    >>> cost(ring.ring_all_reduce(4), 8, mesh)  # 2 (4 - 1) (1 + 8 / 4 * 0.5)
    12.0

  Args:
    schedule: what to time.
    num_bytes: the size of the buffer, cut into chunks by `chunk_sizes`.
    topology: of as many ranks as the schedule.

  Returns:
    Seconds. O(T) for T transfers.
  """
  sizes = schedule_lib.chunk_sizes(num_bytes, schedule.num_chunks)
  return math.fsum(
    _round_seconds(transfers, sizes, topology)
    for transfers in schedule.rounds()
  )


def choose(
  num_bytes: int,
  topology: Topology,
  candidates: Sequence[str] = CANDIDATES,
) -> schedule_lib.Schedule:
  """Returns the cheapest schedule for a buffer.

  Only the arguments count, so that ranks that ask for themselves agree. On a tie
  the first candidate wins: by default the ring, which suffers least where links
  are shared, something that the model does not see.

  Example:

    >>> mesh = Topology(7, Link(5e-5, 1e-9))
    >>> choose(400, mesh).name, choose(10**9, mesh).name
    ('halving_doubling', 'ring')

  Args:
    num_bytes: the size of the buffer.
    topology: ranks and links.
    candidates: names of algorithms. 'hierarchical' takes the topology's group
      size where it divides the world size.

  Returns:
    The cheapest schedule. O(T) for the T transfers of all candidates.
  """
  world_size, group_size = topology.world_size, topology.group_size
  schedules = []
  for name in candidates:
    if name == 'hierarchical' and group_size and world_size % group_size == 0:
      name = f'hierarchical({group_size})'
    schedules.append(algorithms.build(name, world_size))
  costs = [cost(s, num_bytes, topology) for s in schedules]
  good_enough = min(costs) * (1 + _TIE)
  return next(
    s for s, t in zip(schedules, costs, strict=True) if t <= good_enough
  )


def _round_seconds(
  transfers: Iterable[schedule_lib.Transfer],
  sizes: tuple[int, ...],
  topology: Topology,
) -> float:
  messages: collections.Counter = collections.Counter()
  for t in transfers:
    messages[t.src, t.dst] += sizes[t.chunk]
  # The seconds of each rank, and the bytes that cross the link of each group.
  ranks: collections.Counter = collections.Counter()
  groups: collections.Counter = collections.Counter()
  for ends, num_bytes in messages.items():
    is_near = topology.is_near(*ends)
    link = topology.intra if is_near else topology.inter
    for is_receiver, rank in enumerate(ends):
      ranks[is_receiver, rank] += link.seconds(num_bytes)
      if not is_near:
        groups[is_receiver, rank // topology.group_size] += num_bytes
  # Ranks of a group wait for the latency of their messages at the same time.
  shared = [topology.inter.seconds(n) for n in groups.values()]
  return max([*ranks.values(), *shared], default=0.0)
