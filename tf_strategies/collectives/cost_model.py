"""Time of a schedule on a topology, and the cheapest schedule for a size.

The alpha-beta-gamma model of Thakur, Rabenseifner and Gropp (2005): a message
of m bytes takes `alpha + m beta` seconds, adding them `m gamma`. A rank sends
one message and receives one at a time, both at once (full duplex). Ranks of a
group, such as those of a host, share its link to the other groups: there the bytes
of all of them count.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

from tf_strategies import errors, option_checks
from tf_strategies.collectives import algorithms, codecs
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.collectives.algorithms import hierarchical

# What is compared by default, the preferred first. A new algorithm is not among
# them by itself: it must not change what runs where nobody asked for it.
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


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class Link:
  """What one message costs.

  Example:

    >>> Link(alpha_seconds=1.0, beta_seconds_per_byte=0.5).seconds(4)
    3.0

  Attributes:
    alpha_seconds: latency of a message.
    beta_seconds_per_byte: inverse of the bandwidth.
  """

  alpha_seconds: float
  beta_seconds_per_byte: float

  def __post_init__(self):
    for field in ('alpha_seconds', 'beta_seconds_per_byte'):
      _check_seconds(field, getattr(self, field))

  def seconds(self, num_bytes: float) -> float:
    """Time of one message of `num_bytes`."""
    return self.alpha_seconds + num_bytes * self.beta_seconds_per_byte


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class Topology:
  """Which ranks are near each other, and what their links cost.

  Example:

    >>> near, far = Link(1e-6, 1e-10), Link(5e-5, 1e-9)
    >>> hosts = Topology(8, intra=near, inter=far, group_size=4)
    >>> hosts.link(0, 3) is near, hosts.link(3, 4) is far
    (True, True)

  Attributes:
    world_size: number of ranks.
    intra: the link between ranks of one group; between all without groups.
    inter: the link of a group to the others, which its ranks share; None without
      groups.
    group_size: consecutive ranks in a group (the last group may be smaller),
      None without groups.
    gamma_seconds_per_byte: time to add one received byte.
  """

  world_size: int
  intra: Link
  inter: Link | None = None
  group_size: int | None = None
  gamma_seconds_per_byte: float = 0.0

  def __post_init__(self):
    schedule_lib.check_world_size(self.world_size)
    for name in ('intra', 'inter'):
      link = getattr(self, name)
      option_checks.check(
        isinstance(link, Link) or (name == 'inter' and link is None),
        f'{name}={link!r}',
        'a tfs.collectives.Link',
        'write Link(alpha_seconds=5e-5, beta_seconds_per_byte=1e-9)',
      )
    _check_seconds('gamma_seconds_per_byte', self.gamma_seconds_per_byte)
    if (self.inter is None) != (self.group_size is None):
      raise errors.UnsupportedOptionError(
        f'inter={self.inter!r} with group_size={self.group_size!r}',
        'both or neither',
        'give inter the link between groups and group_size the ranks in one',
      )
    if self.group_size is not None:
      option_checks.check_int(
        'group_size',
        self.group_size,
        1,
        self.world_size,
        fix='give the number of ranks that share the fast links',
      )

  def is_near(self, src: int, dst: int) -> bool:
    """Whether both are in one group, or there are no groups."""
    size = self.group_size
    return size is None or src // size == dst // size

  def link(self, src: int, dst: int) -> Link:
    """Returns `intra` if both ranks are in one group, else `inter`."""
    return self.intra if self.is_near(src, dst) else self.inter


def cost(
  schedule: schedule_lib.Schedule,
  num_bytes: int,
  topology: Topology,
  compression: str = 'none',
) -> float:
  """Modelled time of one all-reduce.

  Chunks that one rank sends to another in the same round are one message. A
  round takes as long as its busiest rank: the sum of its sends, or that of its
  receives and additions, whichever is longer; or as the busiest link of a group,
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
    compression: the codec; `num_bytes` are those of a float32 buffer then, of
      which the links carry the codec's fraction. Additions are of float32. Other
      ways depend on more than bytes: see `compression.Compression.bytes_sent`.

  Returns:
    Seconds. O(T) for T transfers.

  Raises:
    ScheduleError: the world sizes differ, or `num_bytes` is negative.
  """
  _check_sizes(schedule, topology)
  num_bytes = schedule_lib.check_int('num_bytes', num_bytes, 0)
  sizes = schedule_lib.chunk_sizes(num_bytes, schedule.num_chunks)
  ratio = codecs.ratio(compression)
  return math.fsum(
    _round_seconds(transfers, sizes, topology, ratio)
    for transfers in schedule.rounds()
  )


def choose(
  num_bytes: int,
  topology: Topology,
  candidates: Iterable[str | schedule_lib.Schedule] = CANDIDATES,
  compression: str = 'none',
) -> schedule_lib.Schedule:
  """The cheapest schedule for a buffer.

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
    candidates: schedules, or names of algorithms. 'hierarchical' takes the
      topology's group size where it divides the world size.
    compression: as for `cost`.

  Returns:
    The cheapest schedule. O(T) for the T transfers of all candidates.

  Raises:
    ScheduleError: there are no candidates, or one has another world size.
    UnsupportedOptionError: there is no algorithm or codec of a name.
  """
  check_topology(topology)
  candidates = schedule_lib.check_list(
    'candidates', candidates, 'schedules, or names of them'
  )
  schedules = [_candidate(c, topology) for c in candidates]
  if not schedules:
    raise errors.ScheduleError(
      'candidates is empty: pass at least one schedule, or leave it out.'
    )
  costs = [cost(s, num_bytes, topology, compression) for s in schedules]
  good_enough = min(costs) * (1 + _TIE)
  return next(
    s for s, t in zip(schedules, costs, strict=True) if t <= good_enough
  )


def _candidate(
  candidate: str | schedule_lib.Schedule, topology: Topology
) -> schedule_lib.Schedule:
  if isinstance(candidate, schedule_lib.Schedule):
    return candidate
  world_size, group_size = topology.world_size, topology.group_size
  grouped = group_size is not None and world_size % group_size == 0
  if candidate == 'hierarchical' and grouped:
    return hierarchical.hierarchical_all_reduce(world_size, group_size)
  return algorithms.build(candidate, world_size)


def _round_seconds(
  transfers: Iterable[schedule_lib.Transfer],
  sizes: tuple[int, ...],
  topology: Topology,
  ratio: float,
) -> float:
  messages: collections.Counter = collections.Counter()
  sends: collections.Counter = collections.Counter()
  receives: collections.Counter = collections.Counter()
  for t in transfers:
    messages[t.src, t.dst] += sizes[t.chunk]
    if t.reduce:
      receives[t.dst] += sizes[t.chunk]
  for rank in receives:
    receives[rank] *= topology.gamma_seconds_per_byte
  shared: collections.Counter = collections.Counter()
  latencies: dict[tuple[bool, int], float] = {}
  for (src, dst), num_bytes in messages.items():
    link = topology.link(src, dst)
    seconds = link.seconds(num_bytes * ratio)
    sends[src] += seconds
    receives[dst] += seconds
    if not topology.is_near(src, dst):
      for end in ((True, src), (False, dst)):
        group = end[0], end[1] // topology.group_size
        shared[group] += seconds - link.alpha_seconds
        # Ranks wait for their messages at the same time.
        latencies[group] = max(latencies.get(group, 0.0), link.alpha_seconds)
  busy = [seconds + latencies[group] for group, seconds in shared.items()]
  return max([*sends.values(), *receives.values(), *busy], default=0.0)


def check_topology(topology: object) -> None:
  """Raises UnsupportedOptionError for what is no `Topology`."""
  option_checks.check(
    isinstance(topology, Topology),
    f'topology={topology!r}',
    'a tfs.collectives.Topology',
    'write Topology(world_size, Link(alpha_seconds=5e-5, '
    'beta_seconds_per_byte=1e-9))',
  )


def _check_sizes(schedule: schedule_lib.Schedule, topology: Topology) -> None:
  schedule_lib.check_schedule(schedule)
  check_topology(topology)
  if schedule.world_size != topology.world_size:
    raise errors.ScheduleError(
      f'schedule {schedule.name!r} has {schedule.world_size} ranks, the '
      f'topology {topology.world_size}. Build both for the same world size.'
    )


def _check_seconds(field: str, value: float):
  option_checks.check_seconds(
    field,
    value,
    or_zero=True,
    fix='measure it, for instance alpha 5e-5 and beta 1e-9 for sockets at 1 GB/s',
  )
