"""Measures what messages between the ranks of a group cost.

Pairs of ranks swap arrays, a few bytes and then so many that they take a while. A
rank is in one pair at a time, but pairs without a common rank may overlap, also
where they share a host's link. What all have found they tell each other, so that
each holds the same `Topology`. Then all try each algorithm: links alone do not tell how
a network serves many senders at once, or an algorithm's last steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from tf_strategies.collectives import algorithms, cost_model
from tf_strategies.process_group import plan as plan_lib

# Swaps two ranks' arrays: what is sent, where what comes goes.
Swap = Callable[[plan_lib.Plan, np.ndarray, np.ndarray], None]
# Brings one array of each rank to all.
Gather = Callable[[np.ndarray], Sequence[np.ndarray]]
# All-reduces an array into another by an algorithm.
Reduce = Callable[[np.ndarray, np.ndarray, str], None]

# Up to so many ranks, all pairs; of more, those whose links rings have.
_ALL_PAIRS = 8
_SMALL_BYTES, _SMALL_SWAPS = 64, 7
# A first idea of the rate, past what sockets and switches hold back.
_FIRST_BYTES = 1 << 19
_LARGE_SECONDS = 0.05
# So much slower than other links of its ends, a link is looked at again.
_SUSPECT, _ATTEMPTS = 1.1, 3
_MOST_BYTES = 1 << 25
_ADDED_BYTES = 1 << 22
# What an algorithm is tried with: so long one time, and as many times.
_TRIED_SECONDS, _TRIED_BYTES, _TRIES = 0.25, (1 << 16, 1 << 22), 4


def measure(
  topology: cost_model.Topology, rank: int, swap: Swap, gather: Gather
) -> cost_model.Topology:
  """What links and additions cost, the same on every rank.

  Args:
    topology: which ranks share a host, before anything was measured.
    rank: this one.
    swap: runs a plan of two ranks; a collective.
    gather: a collective.

  Returns:
    A topology with `pairs`. Those that were not measured, with many ranks, are the
    median of their kind. About 0.2 s a pair.
  """
  pairs = pairs_to_measure(topology)

  def timed(pair, *sizes):
    """The seconds of a swap of each size; none on other ranks."""
    seconds = []
    for num_bytes in sizes:
      plan = _plan(pair, rank, num_bytes)
      mine = np.zeros(num_bytes, np.uint8)
      theirs = np.empty_like(mine)
      began = time.perf_counter()
      swap(plan, mine, theirs)
      seconds.append(time.perf_counter() - began)
    return np.float64(seconds) if rank in pair else np.zeros(len(sizes))

  def shared(found):
    return np.max(gather(np.float64(found)), axis=0)

  # The first swap makes the link, if there is none. The small one before a large
  # one lets both begin together: who comes late finds the other's bytes there.
  small = [_SMALL_BYTES] * (1 + _SMALL_SWAPS)
  found = shared([timed(pair, *small, _FIRST_BYTES) for pair in pairs])
  alphas = np.min(found[:, 1 : len(small)], axis=1)
  sizes = np.clip(
    _LARGE_SECONDS / (found[:, -1] / _FIRST_BYTES), _FIRST_BYTES, _MOST_BYTES
  ).astype(np.int64)
  # Without a rest: TCP forgets how fast a connection was, and switches let the
  # first bytes after it pass faster than the link. So the first does not count.
  betas = np.full(len(pairs), np.inf)
  again = np.arange(len(pairs))
  for _ in range(_ATTEMPTS):
    found = shared(
      [
        timed(pairs[i], *[int(sizes[i]), _SMALL_BYTES] * 2, int(sizes[i]))
        for i in again
      ]
    )
    large = np.min(found[:, 2::2], axis=1)
    seconds = np.maximum(large - alphas[again], 0.0)
    betas[again] = np.minimum(betas[again], seconds / sizes[again])
    again = _suspects(topology.world_size, pairs, betas)
    if not len(again):
      break
  [gamma] = shared([_seconds_per_added_byte()])
  found = {
    pair: cost_model.Link(float(alpha), float(beta))
    for pair, alpha, beta in zip(pairs, alphas, betas, strict=True)
  }
  return _complete(topology, found, float(gamma))


def calibrated(
  topology: cost_model.Topology,
  names: Sequence[str],
  reduce: Reduce,
  gather: Gather,
) -> cost_model.Topology:
  """The topology with `factors`, the same on every rank.

  Args:
    topology: with links that were measured.
    names: of algorithms.
    reduce: a collective.
    gather: a collective.

  Returns:
    What each algorithm took over what was predicted, the slowest rank's. About
    half a second an algorithm, on links that take no longer than predicted.
  """
  size = topology.world_size
  schedules = [algorithms.build(name, size) for name in names]
  most = _TRIED_BYTES[1]
  slowest = max(cost_model.predicted(s, most, topology) for s in schedules)
  share = min(1.0, _TRIED_SECONDS / slowest)
  num_bytes = max(_TRIED_BYTES[0], int(most * share) // 4 * 4)
  array, out = np.zeros((2, num_bytes // 4), np.float32)
  took = []
  for name in names:
    reduce(array, out, name)  # Makes links and plans.
    began = time.perf_counter()
    for _ in range(_TRIES):  # Without a rest, as buckets follow each other.
      reduce(array, out, name)
    took.append((time.perf_counter() - began) / _TRIES)
  took = np.max(gather(np.float64(took)), axis=0)
  return dataclasses.replace(
    topology,
    factors=tuple(
      (s.name, float(t / cost_model.predicted(s, num_bytes, topology)))
      for s, t in zip(schedules, took, strict=True)
    ),
  )


def _suspects(world_size, pairs, betas) -> np.ndarray:
  """Pairs that seem slower than both of their ends are with others."""
  best = np.full(world_size, np.inf)
  for (a, b), beta in zip(pairs, betas, strict=True):
    best[[a, b]] = np.minimum(best[[a, b]], beta)
  ends = np.array([max(best[a], best[b]) for a, b in pairs])
  return np.flatnonzero(betas > _SUSPECT * ends)


def pairs_to_measure(topology: cost_model.Topology) -> list[tuple[int, int]]:
  """All pairs of a few ranks; of many, neighbours in rings of ranks and of hosts.

  Example:

    >>> pairs_to_measure(cost_model.Topology(3, cost_model.Link(0.0, 1.0)))
    [(0, 1), (0, 2), (1, 2)]
  """
  size = topology.world_size
  if size <= _ALL_PAIRS:
    return list(itertools.combinations(range(size), 2))
  steps = {1, topology.group_size or 1}
  pairs = {(r, (r + step) % size) for r in range(size) for step in steps}
  return sorted({(min(pair), max(pair)) for pair in pairs})


def _plan(pair, rank, num_bytes) -> plan_lib.Plan:
  """What a rank does while two swap arrays: nothing if it is neither."""
  if rank not in pair:
    return plan_lib.Plan((), (), (), {}, {})
  [peer] = set(pair) - {rank}
  stretches = list(plan_lib.BYTES.cut(0, num_bytes))
  pieces = tuple(
    plan_lib.Piece(kind, peer, buffer, start, stop)
    for kind, buffer in (
      (plan_lib.SEND, plan_lib.ARRAY),
      (plan_lib.RECEIVE, plan_lib.OUT),
    )
    for start, stop in stretches
  )
  numbers, count = tuple(range(len(pieces))), len(stretches)
  return plan_lib.Plan(
    pieces,
    (0,) * len(pieces),
    ((),) * len(pieces),
    {peer: numbers[:count]},
    {peer: numbers[count:]},
  )


def _complete(topology, found, gamma) -> cost_model.Topology:
  """The topology of what was found, with the median where nothing was."""

  def typical(links):
    return cost_model.Link(
      statistics.median(link.alpha_seconds for link in links),
      statistics.median(link.beta_seconds_per_byte for link in links),
    )

  kinds: dict[bool, list[cost_model.Link]] = {True: [], False: []}
  for pair, link in found.items():
    kinds[topology.is_near(*pair)].append(link)
  near, far = (typical(kinds[k]) if kinds[k] else None for k in (True, False))
  itself = cost_model.Link(0.0, 0.0)
  size = topology.world_size

  def link(a, b):
    if a == b:
      return itself
    measured = found.get((min(a, b), max(a, b)))
    return measured or (near if topology.is_near(a, b) else far)

  return cost_model.Topology(
    size,
    near or topology.intra,
    far,
    topology.group_size,
    gamma,
    tuple(tuple(link(a, b) for b in range(size)) for a in range(size)),
  )


def _seconds_per_added_byte() -> float:
  """What adding a received byte costs here."""
  a, b = np.ones((2, _ADDED_BYTES // 4), np.float32)
  out = np.ones_like(a)
  seconds = []
  for _ in range(5):
    began = time.perf_counter()
    np.add(a, b, out=out)
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds) / _ADDED_BYTES
