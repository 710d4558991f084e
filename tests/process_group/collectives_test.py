"""Every collective between real processes, compared with exact sums."""

from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import conformance, meetings
from tf_strategies import errors, process_group
from tf_strategies.collectives import algorithms
from tf_strategies.process_group import plan, reductions
from tf_strategies.process_group.tcp import host_memory


def _like_many_ranks(rank, function):
  """Runs a function over sockets, with the algorithms for many ranks."""
  with (
    mock.patch.object(plan, 'FEW_RANKS', 1),
    mock.patch.object(host_memory, 'MemorySlots', side_effect=OSError),
  ):
    return function(rank)


def _run(function, world_size, are_many, **options):
  """Runs a function on each rank; with `are_many`, see `_like_many_ranks`."""
  args = (function,) if are_many else ()
  return processes.run_workers(
    _like_many_ranks if are_many else function, world_size, args=args, **options
  )


def _values(rank, size, dtype):
  """Returns small integers that differ by rank and position. Sums are exact."""
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
  """Runs collectives with two ranks on each of two addresses, as on two hosts."""
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


_ODD = (np.inf, -np.inf, np.inf, np.nan, -0.0, 0.0)
# Values of two ranks. Their sums are rounded, overflow, or are NaN.
_TERMS = np.float32(
  [
    [2048, 2048, 256, 256, 60000, *3 * _ODD],
    [1, 3, 1, 3, 60000, *6 * [1], *6 * [-np.inf], *6 * [-0.0]],
  ]
)


def _sixteen_bits(rank, dtype):
  own = _TERMS[rank].astype(dtype)
  with (
    meetings.meet(rank) as meeting,
    meeting.form() as group,
    np.errstate(all='raise'),
  ):
    out = group.all_reduce(own, algorithm='ring')
    group.barrier()
    return out.astype(np.float32)


class CollectivesTest(parameterized.TestCase):
  @tiers.parameters(
    *tiers.every(tiers.soak, [(1, False), (4, False), (10, True)]),
    *((2, False), (5, True)),
    tiers.smoke(3, False),
    (3, True),
  )
  def test_all_algorithms_sizes_and_dtypes(self, world_size, are_many):
    results = _run(_table, world_size, are_many, is_fresh=True)
    few = 1 if are_many else plan.FEW_RANKS
    with mock.patch.object(plan, 'FEW_RANKS', few):
      conformance.assert_results(self, results)

  @tiers.product(
    world_size=(tiers.soak(1), 3, 8),
    are_many=(False, tiers.smoke(True)),
  )
  def test_broadcast_and_all_gather(self, world_size, are_many):
    self.assertLen(_run(_move, world_size, are_many), world_size)

  @parameterized.parameters('float16', 'bfloat16')
  def test_16_bit_sums_are_rounded_from_float32(self, dtype):
    with np.errstate(all='ignore'):
      expected = np.add(*_TERMS).astype(dtype).astype(np.float32)
    zeros = expected == 0
    for out in processes.run_workers(_sixteen_bits, 2, args=(dtype,)):
      np.testing.assert_array_equal(out, expected)
      signs = np.signbit(out[zeros])
      np.testing.assert_array_equal(signs, np.signbit(expected[zeros]))

  def test_two_hosts_use_the_hierarchical_algorithm(self):
    results = processes.run_workers(_two_hosts, 4)
    expected = sum(_values(r, 400_000, 'float32') for r in range(4))
    for rank, (out, noise, half, sent, chosen, peers) in enumerate(results):
      np.testing.assert_array_equal(out, expected)
      self.assertEqual(noise.tobytes(), results[0][1].tobytes())
      quarter = slice(100_000 * rank, 100_000 * (rank + 1))
      np.testing.assert_array_equal(half, expected[quarter])
      # Half of the array twice within the host, a quarter twice between hosts.
      self.assertEqual(sent, 2 * 4 * (200_000 + 100_000))
      self.assertEqual(chosen[0], 'hierarchical')
      self.assertLen(peers, 3)

  @parameterized.named_parameters(
    ('one_host', 'aaaa', None),
    ('all_different', 'abcd', None),
    ('three_hosts', 'aabbcc', 2),
    ('alternating', 'abab', None),
    ('repeated', 'aabbaa', None),
    ('unequal', 'abb', None),
    ('one_rank', 'a', None),
  )
  def test_group_size_from_hosts(self, hosts, size):
    topology = reductions.topology_of(list(hosts))
    self.assertEqual(topology.group_size, size)
    self.assertEqual(topology.world_size, len(hosts))
    chosen = reductions.choose(
      'all_reduce', topology, 10**7, ('ring', 'direct')
    )
    name = f'hierarchical({size})' if size else 'ring'
    self.assertEqual(chosen, algorithms.build(name, len(hosts)))


class ArgumentsTest(absltest.TestCase):
  def test_unsupported_dtype_and_large_message_are_refused(self):
    with (
      process_group.Rendezvous({0: '127.0.0.1:0'}, 0) as meeting,
      meeting.form() as group,
    ):
      for dtype in ('bool', object, [('a', 'f4')], 'V4'):
        with self.assertRaisesRegex(
          errors.UnsupportedOptionError, 'Fix: cast it'
        ):
          group.all_reduce(np.zeros(3, dtype))
      with self.assertRaisesRegex(ValueError, '1048577 bytes'):
        group.exchange('tag', 'x' * ((1 << 20) - 1))
      values = [np.float32(0.5), {'a': None}]
      self.assertEqual(group.exchange('tag', values), [[0.5, {'a': None}]])

  def test_reduce_scatter_suggests_supported_algorithms(self):
    for name in ('tree', 'naive', 'one_shot'):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, "'ring'"):
        reductions.check_half(name, 3)
    reductions.check_half('halving_doubling', 4)
    with self.assertRaises(errors.UnsupportedOptionError):
      reductions.check_half('halving_doubling', 3)


if __name__ == '__main__':
  absltest.main()
