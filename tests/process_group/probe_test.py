"""What is found out about links, on a clock of each rank and between processes."""

import threading
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest

from tests import processes
from tests.process_group import meetings
from tf_strategies.collectives import algorithms, cost_model
from tf_strategies.process_group import plan, probe

_UNKNOWN = cost_model.Link(1.0, 1.0)


def _link(a, b):
  """Another one for each pair."""
  a, b = min(a, b), max(a, b)
  return cost_model.Link(1e-4 * (1 + a + 10 * b), 1e-9 * (1 + b + 10 * a))


class _Job:
  """Ranks as threads; each has a clock, and two that swap agree on the time."""

  def __init__(self, topology):
    self._topology = topology
    self._local = threading.local()
    self._clocks = [0.0] * topology.world_size
    self._barrier = threading.Barrier(topology.world_size, timeout=30)
    self._gathered = [None] * topology.world_size
    self.swaps = []

  def run(self):
    """What each rank finds."""
    found = [None] * self._topology.world_size

    def work(rank):
      self._local.rank = rank
      found[rank] = probe.measure(
        self._topology, rank, self._swap, self._gather
      )

    threads = [
      threading.Thread(target=work, args=(rank,)) for rank in range(len(found))
    ]
    with mock.patch.object(probe.time, 'perf_counter', self._clock):
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join(30)
    return found

  def _clock(self):
    return self._clocks[self._local.rank]

  def _swap(self, swapped, mine, theirs):
    rank = self._local.rank
    self._barrier.wait()
    if swapped.sends:
      [peer] = swapped.sends
      assert [*swapped.receives] == [peer]
      sent = sum(
        p.stop - p.start for p in swapped.pieces if p.kind == plan.SEND
      )
      assert sent == mine.size == theirs.size
      now = max(self._clocks[rank], self._clocks[peer])
    self._barrier.wait()
    if swapped.sends:
      self._clocks[rank] = now + _link(rank, peer).seconds(sent)
      if rank < peer:
        self.swaps.append((rank, peer))
    else:
      self._clocks[rank] += 17.0  # What others do meanwhile does not count.
    self._barrier.wait()

  def _gather(self, array):
    self._gathered[self._local.rank] = array
    self._barrier.wait()
    everything = list(self._gathered)
    self._barrier.wait()
    return everything


class MeasureTest(absltest.TestCase):
  def test_every_pair_of_a_few(self):
    job = _Job(cost_model.Topology(4, _UNKNOWN, _UNKNOWN, 2))
    found = job.run()
    self.assertEqual(found, [found[0]] * 4)
    for a in range(4):
      for b in range(4):
        link = found[0].link(a, b)
        if a == b:
          self.assertEqual(link.seconds(10), 0.0)
          continue
        self.assertAlmostEqual(
          link.alpha_seconds / _link(a, b).alpha_seconds, 1, delta=0.01
        )
        self.assertAlmostEqual(
          link.beta_seconds_per_byte / _link(a, b).beta_seconds_per_byte,
          1,
          delta=0.05,
        )
    self.assertEqual(found[0].group_size, 2)
    # The kinds: medians of (0, 1), (2, 3), and of the four others.
    near = [_link(0, 1), _link(2, 3)]
    self.assertAlmostEqual(
      found[0].intra.beta_seconds_per_byte,
      np.median([link.beta_seconds_per_byte for link in near]),
      delta=1e-10,
    )
    self.assertNotEqual(found[0].intra, found[0].inter)

  def test_neighbours_of_many(self):
    job = _Job(cost_model.Topology(10, _UNKNOWN))
    found = job.run()
    self.assertEqual(found, [found[0]] * 10)
    ring = {(r, r + 1) for r in range(9)} | {(0, 9)}
    self.assertEqual(set(job.swaps), ring)
    self.assertEqual(found[0].link(2, 5), found[0].intra)
    self.assertAlmostEqual(
      found[0].link(3, 4).beta_seconds_per_byte,
      _link(3, 4).beta_seconds_per_byte,
      delta=1e-9,
    )

  def test_rings_of_hosts(self):
    topology = cost_model.Topology(12, _UNKNOWN, _UNKNOWN, 4)
    pairs = probe.pairs_to_measure(topology)
    self.assertIn((3, 7), pairs)
    self.assertIn((0, 8), pairs)
    self.assertNotIn((0, 2), pairs)
    self.assertLen(pairs, 24)


class CalibratedTest(absltest.TestCase):
  """Each rank waits as an algorithm makes it wait; all hold the slowest's factor."""

  NAMES = ('ring', 'direct', 'hierarchical(2)')

  def _tried(self, rank, slowness, topology):
    clock, rows = [0.0], [np.arange(1.0, 4.0), None]
    self.tried = []

    def reduce(array, out, name):
      del out
      self.tried.append((name, array.nbytes))
      schedule = algorithms.build(name, topology.world_size)
      seconds = cost_model.pipelined(
        schedule, array.nbytes, topology, cost_model.PIECE_BYTES
      )
      clock[0] += seconds * slowness[name] * (1 + rank / 10)

    def gather(took):
      rows[:] = [took, took * np.float64([1.5, 1.0, 1.0])]
      return rows

    with mock.patch.object(probe.time, 'perf_counter', lambda: clock[0]):
      return probe.calibrated(topology, self.NAMES, reduce, gather)

  def test_factor_of_the_slowest_rank_by_algorithm(self):
    link = cost_model.Link(1e-4, 4e-8)
    topology = cost_model.Topology(4, link, pairs=((link,) * 4,) * 4)
    slowness = dict(zip(self.NAMES, (1.0, 2.0, 3.0), strict=True))
    found = self._tried(0, slowness, topology)
    factors = dict(found.factors)
    self.assertAlmostEqual(factors['ring'], 1.5)
    self.assertAlmostEqual(factors['direct'], 2.0)
    self.assertAlmostEqual(factors['hierarchical'], 3.0)
    self.assertEqual(found.pairs, topology.pairs)
    # Every rank reduces equally many bytes, whatever it waits for.
    tried = self.tried
    self._tried(1, slowness, topology)
    self.assertEqual(self.tried, tried)
    self.assertLen({num_bytes for _, num_bytes in tried}, 1)

  def test_slow_links_try_less(self):
    for beta, expected in ((1e-12, 1 << 22), (1e-3, 1 << 16)):
      link = cost_model.Link(0.0, beta)
      topology = cost_model.Topology(4, link, pairs=((link,) * 4,) * 4)
      self._tried(0, dict.fromkeys(self.NAMES, 1.0), topology)
      self.assertEqual({size for _, size in self.tried}, {expected})


def _measured(rank):
  with meetings.meet(rank) as meeting, meeting.form() as group:
    before = group.topology
    found = group.measure_links()
    assert group.topology is found is not before
    total = group.all_reduce(np.arange(70_000, dtype=np.float32) + group.rank)
    group.barrier()
    return found, float(total[5])


@pytest.mark.multi_process
class ProcessesTest(absltest.TestCase):
  def test_all_ranks_hold_the_same(self):
    results = processes.run_workers(_measured, 3)
    topology = results[0][0]
    self.assertEqual(results, [(topology, 3 * 5 + 3.0)] * 3)
    # Between a copy in memory and a slow machine under load.
    for a, b in ((0, 1), (0, 2), (1, 2)):
      link = topology.link(a, b)
      self.assertEqual(link, topology.link(b, a))
      self.assertBetween(link.alpha_seconds, 1e-6, 1.0)
      self.assertBetween(link.beta_seconds_per_byte, 1e-12, 1e-6)
    self.assertBetween(topology.gamma_seconds_per_byte, 1e-12, 1e-7)
    factors = dict(topology.factors)
    self.assertEqual(
      [*factors], ['ring', 'halving_doubling', 'double_binary_tree', 'direct']
    )
    for factor in factors.values():
      self.assertBetween(factor, 0.01, 1e4)


if __name__ == '__main__':
  absltest.main()
