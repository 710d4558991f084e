"""Chooses the plan of a reduction, after checking its arguments."""

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from tf_strategies import errors
from tf_strategies.collectives import algorithms, cost_model
from tf_strategies.collectives import schedule as schedule_lib
from tf_strategies.process_group import plan as plan_lib

# They are added in float32, and rounded once a round.
_ROUNDED = ('float16', 'bfloat16')
# They need no links between all pairs of many ranks.
_CANDIDATES_OF_MANY = ('ring', 'tree')
# Among more ranks the ring is never the cheapest, and planning it takes quadratic time.
_MOST_IN_A_RING = 128
# Assumed: sockets between hosts, 50 us and 1 GB/s, and the memory
# of processes of one host, 30 us and 5 GB/s.
_SOCKETS = cost_model.Link(alpha_seconds=5e-5, beta_seconds_per_byte=1e-9)
_MEMORY = cost_model.Link(alpha_seconds=3e-5, beta_seconds_per_byte=2e-10)


def digest(text: str) -> int:
  """Returns 64 bits that tell collectives apart by their texts."""
  data = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(data, 'little')


def sum_dtype(dtype: np.dtype) -> np.dtype:
  """Returns the dtype in which values of a dtype are added.

  Example:

    >>> [sum_dtype(np.dtype(name)).name for name in ('float16', 'float64')]
    ['float32', 'float64']
  """
  return np.dtype(np.float32) if dtype.name in _ROUNDED else dtype


def reduction(
  kind: str,
  length: int,
  dtype: np.dtype,
  algorithm: str,
  *,
  rank: int,
  candidates: tuple[str, ...],
  topology: cost_model.Topology,
  piece_bytes: int,
) -> tuple[str, plan_lib.RankPlan]:
  """Returns the text and the plan of an `all_reduce` or `reduce_scatter`.

  Raises:
    UnsupportedOptionError: numbers of that dtype cannot be added.
  """
  # bfloat16 and its like are of kind V, with additions of their own.
  if dtype.kind not in 'iufcV' or dtype.type is np.void:
    raise errors.UnsupportedOptionError(
      f'{kind} of dtype {dtype}',
      'integers, floats or complex numbers',
      'cast it to a numeric dtype first',
    )
  num_bytes = length * dtype.itemsize
  if algorithm == 'auto':
    is_rounded = sum_dtype(dtype) != dtype
    schedule = choose(kind, topology, num_bytes, candidates, is_rounded)
    algorithm = schedule.name
  else:
    schedule = algorithms.build(algorithm, topology.world_size)
  if kind == 'reduce_scatter':
    schedule = schedule.reduce_scatter()
  array = f'{dtype_text(dtype)}[{length}]'
  text = f'{kind} {{!r}} of {array} by {algorithm}'
  plan = plan_lib.from_schedule(
    schedule, rank, length, dtype.itemsize, piece_bytes
  )
  return text, plan


def topology_of(hosts: Sequence[str]) -> cost_model.Topology:
  """Returns the links that 'auto' assumes between ranks on these hosts.

  Example:

    >>> topology_of(['a', 'a', 'b', 'b']).group_size
    2
    >>> topology_of(['a', 'a', 'b']).group_size is None
    True

  Args:
    hosts: of each rank. They are groups where each has equally many ranks, which
      follow each other.
  """
  groups = [len(list(ranks)) for _, ranks in itertools.groupby(hosts)]
  size = groups[0]
  are_equal = set(groups) == {size} and len(groups) == len(set(hosts))
  if are_equal and 1 < size < len(hosts):
    return cost_model.Topology(len(hosts), _MEMORY, _SOCKETS, size)
  return cost_model.Topology(len(hosts), _SOCKETS)


def choose(
  kind: str,
  topology: cost_model.Topology,
  num_bytes: int,
  candidates: tuple[str, ...],
  is_rounded: bool = False,
) -> schedule_lib.Schedule:
  """Returns the schedule for 'auto'. In large groups it avoids links to all ranks."""
  is_whole = kind == 'all_reduce'
  is_small = num_bytes <= plan_lib.SMALL_BYTES
  world_size = topology.world_size
  are_few = world_size <= plan_lib.FEW_RANKS
  if are_few and is_small:
    candidates = ('one_shot',) if is_whole else ('direct',)
  elif is_rounded:
    # It rounds twice, whatever the number of ranks.
    candidates = ('direct',)
  elif not are_few and not is_whole:
    candidates = ('ring',)
  elif not are_few and is_small:
    candidates = ('tree',)
  else:
    if not are_few:
      candidates = _CANDIDATES_OF_MANY[world_size > _MOST_IN_A_RING :]
    if is_whole and topology.group_size:
      candidates = (*candidates, 'hierarchical')
  return cost_model.choose(num_bytes, topology, candidates)


def check_half(algorithm: str, world_size: int) -> None:
  """Checks that an algorithm has a reduce-scatter half."""

  try:
    algorithms.build(algorithm, world_size).reduce_scatter()
  except errors.ScheduleError as e:
    raise errors.UnsupportedOptionError(
      f'reduce_scatter by {algorithm!r} between {world_size} processes',
      "an algorithm with one chunk for each rank, such as 'ring' or 'direct'",
      "leave it out for 'auto'",
    ) from e


def dtype_text(dtype: np.dtype) -> str:
  """Returns a dtype's name, with its byte order if it is not the native one."""
  return dtype.name if dtype.isnative else dtype.str
