"""What a step's communication will take, for each way to do it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tf_strategies import errors, option_checks, process_group
from tf_strategies.collectives import (
  algorithms,
  bucketing,
  codecs,
  cost_model,
)
from tf_strategies.process_group import plan as plan_lib
from tf_strategies.process_group import reductions

BUCKET_BYTES = (1 << 20, 8 << 20, 64 << 20)
COMPRESSIONS = ('none', 'bfloat16', 'float16', 'int8')
# As TensorFlow's graphs pack them: larger ones travel alone, without a copy.
_ALONE_BYTES = 1 << 20
# What codecs are added up by: two roundings, however many ranks there are.
_OF_CODECS = 'direct'
# So near to the best, smaller buckets are better: more of them are hidden. So are
# algorithms in which each rank hears from one other: TCP serves many worse.
_AS_GOOD = 1.05
_PREFERRED = (
  'hierarchical',
  'ring',
  'halving_doubling',
  'double_binary_tree',
  'direct',
  'tree',
)
# A schedule has some transfers for each worker, of each chunk.
_MOST = 4096
_TIMED = 1 << 18


@dataclasses.dataclass(frozen=True)
class Way:
  """One way to all-reduce the gradients of a step.

  Attributes:
    algorithm: its name.
    compression: the codec's name.
    bucket_bytes: the most that a bucket holds.
    num_buckets: how many there are.
    wire_bytes: that a worker sends in a step, the most of all.
    seconds: of communication in a step, if nothing hides it.
  """

  algorithm: str
  compression: str
  bucket_bytes: int
  num_buckets: int
  wire_bytes: int
  seconds: float

  def options(self) -> dict[str, Any]:
    """Arguments for `tfs.RingOptions` that choose this way."""
    return {
      'all_reduce': self.algorithm,
      'compression': self.compression,
      'bucket_bytes': self.bucket_bytes,
    }


@dataclasses.dataclass(frozen=True)
class Plan:
  """All ways, the fastest first, and what they were computed from.

  Attributes:
    ways: by `seconds`.
    topology: what links cost.
    parameter_bytes: of the gradients, in float32.
  """

  ways: tuple[Way, ...]
  topology: cost_model.Topology
  parameter_bytes: int

  @property
  def is_measured(self) -> bool:
    """Whether links were measured; they are assumed if not."""
    return self.topology.pairs is not None

  def best(self, compression: str | None = 'none') -> Way:
    """The way to take: of those within a twentieth of the fastest, the smallest buckets.

    Args:
      compression: of the way; None for any, which may cost precision.

    Raises:
      UnsupportedOptionError: no way with that was planned.
    """
    allowed = {way.compression for way in self.ways}
    if compression is not None:
      option_checks.check_choice('compression', compression, allowed)
      allowed = {compression}
    ways = [way for way in self.ways if way.compression in allowed]
    enough = _AS_GOOD * ways[0].seconds
    return min(
      (way for way in ways if way.seconds <= enough),
      key=lambda way: (way.bucket_bytes, _rank(way.algorithm)),
    )

  def __str__(self):
    size = self.topology.world_size
    source = (
      'measured links' if self.is_measured else 'assumed links: simulated'
    )
    lines = [
      f'{size} workers, {self.parameter_bytes / 1e6:.1f} MB of gradients, {source}',
      f'{"algorithm":<20} {"compression":<11} {"bucket MB":>9} {"buckets":>7} '
      f'{"MB sent":>8} {"ms a step":>9}',
    ]
    lines += [
      f'{way.algorithm:<20} {way.compression:<11} {way.bucket_bytes / 1e6:>9.1f} '
      f'{way.num_buckets:>7} {way.wire_bytes / 1e6:>8.2f} {1e3 * way.seconds:>9.2f}'
      for way in self.ways
    ]
    return '\n'.join(lines)


def plan(
  model: Any,
  cluster: Any,
  *,
  compressions: Iterable[str] = COMPRESSIONS,
  bucket_bytes: Iterable[int] = BUCKET_BYTES,
) -> Plan:
  """Predicts the communication of a training step for each way to do it.

  A way is an algorithm, a codec and a size of buckets. On a process group, or a
  strategy that has one, links are measured first (a collective, some seconds; from
  then on its `all_reduce='auto'` chooses by them too). What a step computes
  meanwhile, and may hide, is not in the figures.

  Example:

    >>> from tf_strategies.collectives import Link, Topology
    >>> network = Topology(4, Link(alpha_seconds=1e-4, beta_seconds_per_byte=8e-9))
    >>> found = plan([25_000_000], network, compressions=['none'])
    >>> found.best().algorithm, round(found.best().seconds, 2)
    ('ring', 0.3)

  Args:
    model: a Keras model, or the bytes of each trainable variable (float32).
    cluster: a `MultiWorkerRingStrategy`, a `ProcessGroup`, or a
      `tfs.collectives.Topology`, with which nothing is measured.
    compressions: names of codecs; what they compute is timed here.
    bucket_bytes: what `RingOptions.bucket_bytes` could be.

  Returns:
    A `Plan`: print it for a table, and take
    `tfs.RingOptions(**found.best().options())`.

  Raises:
    UnsupportedOptionError: an argument of another kind.
    Error: as `ProcessGroup.all_reduce`, where links are measured.
  """
  sizes = sizes_of(model)
  compressions = _several('compressions', compressions)
  bucket_bytes = _several('bucket_bytes', bucket_bytes)
  for compression in compressions:
    codecs.get(compression)
  for most in bucket_bytes:
    option_checks.check_int('bucket_bytes', most, 1)
  topology = _topology_of(cluster)
  ways, planned = [], set()
  for most in sorted(map(int, bucket_bytes)):
    buckets = buckets_of(sizes, most)
    if tuple(buckets) in planned:  # Larger ones would be the same.
      continue
    planned.add(tuple(buckets))
    for compression in compressions:
      for algorithm in _candidates(topology, compression):
        ways.append(_way(algorithm, compression, most, buckets, topology))
  if not ways:
    raise errors.UnsupportedOptionError(
      'no compressions or no bucket_bytes', 'one of each', 'leave them out'
    )
  ways.sort(key=lambda way: way.seconds)
  return Plan(tuple(ways), topology, sum(sizes))


def extrapolate(
  topology: cost_model.Topology, world_size: int
) -> cost_model.Topology:
  """The same links between another number of workers: assumed, not measured.

  Example:

    >>> from tf_strategies.collectives import Link, Topology
    >>> extrapolate(Topology(2, Link(0.0, 1.0)), 1000).world_size
    1000

  Raises:
    UnsupportedOptionError: more workers than schedules are made for.
  """
  cost_model.check_topology(topology)
  option_checks.check_int(
    'world_size', world_size, 1, _MOST, fix='ask for fewer workers'
  )
  size = topology.group_size
  if size is None or world_size % size or world_size == size:
    link = topology.intra if size is None else topology.inter
    return cost_model.Topology(
      world_size,
      link,
      gamma_seconds_per_byte=topology.gamma_seconds_per_byte,
    )
  return cost_model.Topology(
    world_size,
    topology.intra,
    topology.inter,
    size,
    topology.gamma_seconds_per_byte,
  )


def sizes_of(model: Any) -> list[int]:
  """The bytes of each trainable variable's gradient, or those that are given."""
  variables = getattr(model, 'trainable_variables', None)
  if variables is not None:
    return [4 * int(np.prod(v.shape)) for v in variables]
  if isinstance(model, Sequence) and not isinstance(model, str | bytes):
    option_checks.check(
      model, 'no variable at all', 'one or more', 'pass a model that is built'
    )
    for size in model:
      option_checks.check_int('the bytes of a variable', size, 0)
    return list(model)
  raise errors.UnsupportedOptionError(
    f'model={model!r}',
    'a Keras model that is built, or the bytes of each trainable variable',
    'write for instance [4 * 1024 * 1024, 4 * 1024]',
  )


def _several(name: str, values: object) -> tuple[Any, ...]:
  is_list = isinstance(values, Iterable) and not isinstance(values, str | bytes)
  option_checks.check(
    is_list, f'{name}={values!r}', 'a list', f'write {name}=[{values!r}]'
  )
  return tuple(values)


def _topology_of(cluster: Any) -> cost_model.Topology:
  if isinstance(cluster, cost_model.Topology):
    return cluster
  group = getattr(cluster, 'process_group', cluster)
  if isinstance(group, process_group.ProcessGroup):
    return group.measure_links()
  raise errors.UnsupportedOptionError(
    f'cluster={cluster!r}',
    'a MultiWorkerRingStrategy, a ProcessGroup or a Topology',
    'pass the strategy in whose scope the model trains',
  )


def buckets_of(sizes: Sequence[int], most: int) -> list[int]:
  """The bytes of each bucket of gradients, as a strategy packs them.

  Example:

    >>> buckets_of([4000, 3_000_000, 8000, 4], 2_000_000)
    [8004, 3000000, 4000]

  Args:
    sizes: of the variables, in the order of the model.
    most: what a bucket holds, unless one tensor is larger.
  """
  packed = [
    min(max(size, 1), most) if size < _ALONE_BYTES else most for size in sizes
  ]
  return [
    sum(sizes[i] for i in bucket.indices)
    for bucket in bucketing.plan_buckets(packed, ['float32'] * len(sizes), most)
  ]


def _candidates(topology: cost_model.Topology, compression: str) -> list[str]:
  if compression != 'none':
    is_few = topology.world_size <= plan_lib.FEW_RANKS
    return [_OF_CODECS] if is_few else []
  return reductions.ways_of(topology)


def _rank(algorithm: str) -> int:
  """The place of an algorithm among those that are equally fast."""
  return _PREFERRED.index(algorithm.partition('(')[0])


def _way(algorithm, compression, most, buckets, topology) -> Way:
  schedule = algorithms.build(algorithm, topology.world_size)
  ratio = codecs.ratio(compression)
  seconds, sent = 0.0, 0.0
  for num_bytes in buckets:
    seconds += _seconds(schedule, num_bytes, topology, compression)
    sent += ratio * _most_sent(schedule, num_bytes)
  return Way(algorithm, compression, most, len(buckets), round(sent), seconds)


@functools.lru_cache(maxsize=1024)
def _seconds(schedule, num_bytes, topology, compression) -> float:
  seconds = cost_model.predicted(schedule, num_bytes, topology, compression)
  # Each rank encodes its array and the sum of its chunk, and decodes as much twice.
  coded = num_bytes / 4 * (1 + 1 / topology.world_size)
  return seconds + coded * _codec_seconds(compression)


@functools.lru_cache(maxsize=1024)
def _most_sent(schedule, num_bytes) -> int:
  sizes = cost_model.schedule_lib.chunk_sizes(num_bytes, schedule.num_chunks)
  return max(schedule.bytes_out(sizes))


@functools.lru_cache
def _codec_seconds(compression: str) -> float:
  """What encoding and decoding an element costs here."""
  codec = codecs.get(compression)
  if codec is codecs.NONE:
    return 0.0
  values = np.linspace(-1, 1, _TIMED, dtype=np.float32)
  out = np.empty_like(values)
  seconds = []
  for _ in range(3):
    began = time.perf_counter()
    codec.decode(codec.encode(values), out)
    seconds.append(time.perf_counter() - began)
  return min(seconds) / _TIMED
