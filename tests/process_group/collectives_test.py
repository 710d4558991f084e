"""Every collective between real processes, against sums that are exact."""

from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import conformance, meetings
from tf_strategies import errors, process_group
from tf_strategies.collectives import algorithms
from tf_strategies.process_group import plan, reductions


def _as_if_many(rank, function):
  """Runs a function where even two ranks count as many."""
  with mock.patch.object(plan, 'FEW_RANKS', 1):
    return function(rank)


def _run(function, world_size, are_many, **options):
  """Runs a function on each rank; with `are_many`, as if the ranks were many."""
  args = (function,) if are_many else ()
  return processes.run_workers(
    _as_if_many if are_many else function, world_size, args=args, **options
  )


def _values(rank, size, dtype):
  """Small integers that tell ranks and positions apart; sums are exact."""
  return ((np.arange(size) * 3 + rank * 7) % 41).astype(dtype)


def _noise(rank, size):
  return np.random.RandomState(rank).standard_normal(size).astype(np.float32)


def _move(rank):
  with (
    conformance.small_pieces(),
    meetings.meet(rank) as meeting,
    meeting.form() as group,
  ):
    conformance.check_moves(group)
    conformance.check_barrier(group)


def _table(rank):
  with (
    conformance.small_pieces(),
    meetings.meet(rank) as meeting,
    meeting.form() as group,
  ):
    results = conformance.run(group)
    assert meetings.no_tensorflow()
    group.barrier()
    return results


def _two_hosts(rank):
  """Two ranks on each of two addresses, which count as hosts."""
  chosen, choose = [], reductions.cost_model.choose

  def seen(*args):
    chosen.append(choose(*args).name)
    return choose(*args)

  places = meetings.addresses()
  for task in (2, 3):
    places[task] = places[task].replace('127.0.0.1', '127.0.0.2')
  with (
    conformance.small_pieces(),
    process_group.Rendezvous(places, rank) as meeting,
    meeting.form() as group,
    mock.patch.object(reductions.cost_model, 'choose', seen),
  ):
    before = group.bytes_sent
    out = group.all_reduce(_values(group.rank, 400_000, 'float32'))
    sent = group.bytes_sent - before
    noise = group.all_reduce(_noise(group.rank, 5003), algorithm='auto')
    half = group.reduce_scatter(_values(group.rank, 400_000, 'float32'))
    group.barrier()
    return out, noise, half, sent, chosen, sorted(group.paths())


class CollectivesTest(parameterized.TestCase):
  @tiers.parameters(
    *tiers.every(tiers.soak, [(1, False), (2, False), (4, False), (10, True)]),
    tiers.smoke(3, False),
    (3, True),
  )
  def test_table_of_algorithms_and_dtypes(self, world_size, are_many):
    results = _run(_table, world_size, are_many, is_fresh=True)
    few = 1 if are_many else plan.FEW_RANKS
    with mock.patch.object(plan, 'FEW_RANKS', few):
      conformance.assert_results(self, results)

  @tiers.product(
    world_size=(tiers.soak(1), 3, tiers.soak(5)),
    are_many=(False, tiers.smoke(True)),
  )
  def test_broadcast_and_all_gather(self, world_size, are_many):
    self.assertLen(_run(_move, world_size, are_many), world_size)

  def test_two_levels_between_hosts(self):
    results = processes.run_workers(_two_hosts, 4)
    expected = sum(_values(r, 400_000, 'float32') for r in range(4))
    for rank, (out, noise, half, sent, chosen, peers) in enumerate(results):
      np.testing.assert_array_equal(out, expected)
      self.assertEqual(noise.tobytes(), results[0][1].tobytes())
      quarter = slice(100_000 * rank, 100_000 * (rank + 1))
      np.testing.assert_array_equal(half, expected[quarter])
      # Half of the array twice within the host, half of that twice beyond it.
      self.assertEqual(sent, 2 * 4 * (200_000 + 100_000))
      self.assertEqual(chosen[0], 'hierarchical')
      self.assertLen(peers, 3)

  @parameterized.named_parameters(
    ('one', 'aaaa', None),
    ('apart', 'abcd', None),
    ('two', 'aabb', 2),
    ('three', 'aabbcc', 2),
    ('uneven', 'aaab', None),
    ('in_turns', 'abab', None),
    ('again', 'aabbaa', None),
    ('first_alone', 'abb', None),
    ('alone', 'a', None),
  )
  def test_groups_by_hosts(self, hosts, size):
    topology = reductions.topology_of(list(hosts))
    self.assertEqual(topology.group_size, size)
    self.assertEqual(topology.world_size, len(hosts))
    chosen = reductions.choose(
      'all_reduce', topology, 10**7, ('ring', 'direct')
    )
    name = f'hierarchical({size})' if size else 'ring'
    self.assertEqual(chosen, algorithms.build(name, len(hosts)))


class ArgumentsTest(parameterized.TestCase):
  @parameterized.parameters('bool', object, [[('a', 'f4')]], 'V4')
  def test_dtype_without_a_sum_is_refused(self, dtype):
    with (
      process_group.Rendezvous({0: '127.0.0.1:0'}, 0) as meeting,
      meeting.form() as group,
      self.assertRaisesRegex(errors.UnsupportedOptionError, 'Fix: cast it'),
    ):
      group.all_reduce(np.zeros(3, dtype))

  def test_reduce_scatter_names_the_algorithms_that_have_one(self):
    for name in ('tree', 'naive', 'one_shot'):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, "'ring'"):
        reductions.check_half(name, 3)
    reductions.check_half('halving_doubling', 4)
    with self.assertRaises(errors.UnsupportedOptionError):
      reductions.check_half('halving_doubling', 3)


if __name__ == '__main__':
  absltest.main()
