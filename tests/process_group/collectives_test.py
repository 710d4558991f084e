"""Every collective between real processes, against sums that are exact."""

import functools
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import conformance, meetings
from tf_strategies import errors, process_group
from tf_strategies.collectives import codecs
from tf_strategies.process_group import plan, reductions

_DTYPES = ('float16', 'float32', 'float64', 'int32', 'int64', 'uint8')
# Fewer elements than ranks, uneven chunks, and both sides of the limit (256
# bytes) up to which everything goes to everyone.
_SIZES = (0, 1, 2, 7, 32, 64, 65, 1000, 4099)
_OPTIONS = {'small_message_bytes': 256, 'sub_chunk_bytes': 192}


def _as_if_many(rank, function):
  """Runs a function where even two ranks count as many."""
  with mock.patch.object(plan, 'FEW_RANKS', 1):
    return function(rank)


def _values(rank, size, dtype):
  """Small integers that tell ranks and positions apart; sums are exact."""
  return ((np.arange(size) * 3 + rank * 7) % 41).astype(dtype)


def _noise(rank, size):
  return np.random.RandomState(rank).standard_normal(size).astype(np.float32)


def _all_reduce(rank):
  results = {}
  with meetings.meet(rank, **_OPTIONS) as meeting, meeting.form() as group:
    for dtype in _DTYPES:
      for size in _SIZES:
        for op in ('sum', 'min', 'max'):
          array = _values(group.rank, size, dtype)
          before = array.copy()
          out = group.all_reduce(array, op=op, name=f'{dtype}/{size}')
          assert np.array_equal(array, before)
          assert out.ctypes.data % 64 == 0
          results[dtype, size, op] = out.copy()
    for size in (40, 5003):
      into = np.empty(size, np.float32)
      out = group.all_reduce(_noise(group.rank, size), out=into)
      assert out is into
      results['noise', size] = out
    assert meetings.no_tensorflow()
    group.barrier()
    return results


def _moves(rank):
  with meetings.meet(rank, **_OPTIONS) as meeting, meeting.form() as group:
    own, results = group.rank, {}
    for size in (0, 3, 500):
      for root in range(group.world_size):
        array = np.arange(size * 2).reshape(size, 2) + 1000 * own
        results['broadcast', size, root] = group.broadcast(array, root)
      ragged = np.full((size * own + (own + 1) % 2, 3), own, np.int16)
      results['all_gather', size] = group.all_gather(ragged)
      equal = np.arange(size * 2).reshape(size, 2) + 1000.5 * own
      results['all_gather_equal', size] = group.all_gather_equal(equal)
    results['scalar'] = group.broadcast(np.array(7.5 + own), 0)
    group.barrier(name='end')
    return results


def _table(rank):
  with (
    meetings.meet(rank, **conformance.OPTIONS) as meeting,
    meeting.form() as group,
  ):
    results = conformance.run(group)
    group.barrier()
    return results


def _rounded(array, name):
  """What a codec makes of an array; encoding it again changes nothing."""
  codec = codecs.get(name)
  return codec.decode(codec.encode(array))


def _encoded(rank, name):
  with meetings.meet(rank, **_OPTIONS) as meeting, meeting.form() as group:
    results = {}
    for size in (0, 1, 9, 100, 129, 3000):
      before = group.bytes_sent
      array = _rounded(_noise(group.rank, size), name)
      out = group.all_reduce(array, compression=name)
      results[size] = out.copy(), group.bytes_sent - before
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
  options = process_group.GroupOptions(
    small_message_bytes=256, sub_chunk_bytes=192
  )
  with (
    process_group.Rendezvous(places, rank, options) as meeting,
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


def _large(rank):
  """More than the sockets' buffers hold, in both directions at once."""
  with meetings.meet(rank) as meeting, meeting.form() as group:
    results = []
    for size in (300_001, 5_000_003):
      array = np.arange(size, dtype=np.float32) % 1000 + group.rank
      out = group.all_reduce(array)
      expected = group.world_size * (np.arange(size) % 1000)
      expected += sum(range(group.world_size))
      results.append(np.array_equal(out, expected.astype(np.float32)))
      got = group.broadcast(out + group.rank, group.world_size - 1)
      results.append(np.array_equal(got, out + group.world_size - 1))
      results.append(group.bytes_sent)
    group.barrier()
    return results


@pytest.mark.multi_process
class CollectivesTest(parameterized.TestCase):
  @tiers.parameters(*tiers.every(tiers.soak, (1, 2, 4, 5)), tiers.smoke(3))
  def test_all_reduce(self, world_size):
    results = processes.run_workers(_all_reduce, world_size, is_fresh=True)
    for dtype in _DTYPES:
      for size in _SIZES:
        inputs = [_values(r, size, dtype) for r in range(world_size)]
        for op, ufunc in (
          ('sum', np.add),
          ('min', np.minimum),
          ('max', np.maximum),
        ):
          expected = ufunc.reduce(np.stack(inputs), dtype=dtype)
          for result in results:
            np.testing.assert_array_equal(result[dtype, size, op], expected)
            self.assertEqual(result[dtype, size, op].dtype, dtype)
    for size in (40, 5003):
      expected = sum(_noise(r, size).astype('f8') for r in range(world_size))
      for result in results:
        out = result['noise', size]
        self.assertEqual(out.tobytes(), results[0]['noise', size].tobytes())
        np.testing.assert_allclose(out, expected, atol=1e-5)

  @tiers.parameters(tiers.soak(1), tiers.soak(2), tiers.smoke(3), tiers.soak(4))
  def test_table_of_algorithms_and_codecs(self, world_size):
    conformance.assert_results(self, processes.run_workers(_table, world_size))

  @tiers.parameters(tiers.soak(2), 3, tiers.soak(5), tiers.soak(10))
  def test_table_among_many(self, world_size):
    results = processes.run_workers(_as_if_many, world_size, args=(_table,))
    with mock.patch.object(plan, 'FEW_RANKS', 1):
      conformance.assert_results(self, results)

  @pytest.mark.soak
  def test_one_bit_on_one_rank_is_seen(self):
    results = [
      {case: conformance.expected(case, 2)[r] for case in conformance.cases(2)}
      for r in range(2)
    ]
    conformance.assert_results(self, results)
    case = next(c for c in results[1] if c.size == 64 and c.op == 'max')
    wrong = bytearray(results[1][case][1])
    wrong[17] ^= 1
    results[1][case] = [results[1][case][0], bytes(wrong)]
    with self.assertRaises(AssertionError):
      conformance.assert_results(self, results)

  @tiers.product(
    world_size=(tiers.soak(1), tiers.smoke(2), tiers.soak(3), tiers.soak(5)),
    are_many=(False, tiers.smoke(True)),
  )
  def test_broadcast_and_all_gather(self, world_size, are_many):
    how = (_as_if_many, _moves) if are_many else (_moves,)
    for result in processes.run_workers(how[0], world_size, args=how[1:]):
      for size in (0, 3, 500):
        for root in range(world_size):
          expected = np.arange(size * 2).reshape(size, 2) + 1000 * root
          np.testing.assert_array_equal(
            result['broadcast', size, root], expected
          )
        for rank, got in enumerate(result['all_gather', size]):
          expected = np.full((size * rank + (rank + 1) % 2, 3), rank, np.int16)
          np.testing.assert_array_equal(got, expected)
          self.assertEqual(got.dtype, np.int16)
        rows = np.arange(size * 2).reshape(size, 2)
        np.testing.assert_array_equal(
          result['all_gather_equal', size],
          np.concatenate([rows + 1000.5 * r for r in range(world_size)]),
        )
      self.assertEqual(result['scalar'], 7.5)
      self.assertEqual(result['scalar'].shape, ())

  @tiers.product(
    world_size=(tiers.soak(2), 3), name=('bfloat16', tiers.soak('float16'))
  )
  def test_encoded_sums_are_made_in_float32_and_encoded_once(
    self, world_size, name
  ):
    results = processes.run_workers(_encoded, world_size, args=(name,))
    for size in (0, 1, 9, 100, 129, 3000):
      total = _rounded(_noise(0, size), name)
      for rank in range(1, world_size):
        total += _rounded(_noise(rank, size), name)
      for result in results:
        np.testing.assert_array_equal(result[size][0], _rounded(total, name))
    sent = [result[3000][1] for result in results]
    # 2 (N - 1) / N of the encoded buffer.
    self.assertEqual(
      sent, [2 * (world_size - 1) * 6000 // world_size] * len(sent)
    )

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
    name = reductions.choose(
      'all_reduce', topology, 10**7, False, ('ring', 'direct')
    )
    self.assertEqual(name, f'hierarchical({size})' if size else 'ring')

  @tiers.parameters(2, tiers.soak(3))
  def test_large_arrays(self, world_size):
    for result in processes.run_workers(_large, world_size):
      self.assertEqual([result[i] for i in (0, 1, 3, 4)], [True] * 4)


class ArgumentsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('two_dimensions', np.zeros((2, 2)), {}),
    ('strided', np.zeros(8)[::2], {}),
    ('bool', np.zeros(3, bool), {}),
    ('objects', np.array([object()]), {}),
    ('structures', np.zeros(3, [('a', 'f4')]), {}),
    ('raw_bytes', np.zeros(3, 'V4'), {}),
    ('name', np.zeros(3), {'name': 3}),
    ('unhashable_op', np.zeros(3), {'op': ['sum']}),
    ('list', [1, 2], {}),
    ('op', np.zeros(3), {'op': 'mean'}),
    ('compression', np.zeros(3), {'compression': 'zip'}),
    ('algorithm', np.zeros(3), {'algorithm': 'rung'}),
    ('out_dtype', np.zeros(3), {'out': np.zeros(3, np.float32)}),
    ('out_shape', np.zeros(3), {'out': np.zeros(4)}),
  )
  def test_unusable_argument_is_refused(self, array, options):
    with (
      process_group.Rendezvous({0: '127.0.0.1:0'}, 0) as meeting,
      meeting.form() as group,
      self.assertRaisesRegex(ValueError, 'Fix'),
    ):
      group.all_reduce(array, **options)

  def test_reduce_scatter_names_the_algorithms_that_have_one(self):
    for name in ('tree', 'naive', 'one_shot'):
      with self.assertRaisesRegex(errors.UnsupportedOptionError, "'ring'"):
        reductions.check_half(name, 3)
    reductions.check_half('halving_doubling', 4)
    with self.assertRaises(errors.UnsupportedOptionError):
      reductions.check_half('halving_doubling', 3)

  def test_a_name_of_its_own_costs_no_choice_of_an_algorithm(self):
    reductions.cheapest.cache_clear()
    with mock.patch.object(
      reductions.cost_model, 'choose', wraps=reductions.cost_model.choose
    ) as choose:
      for step in range(3):
        how = ('sum', f'step_{step}', 'auto', 'none')
        reductions.reduction(
          *('all_reduce', 4099, np.dtype('float32'), *how),
          world_size=2,
          rank=0,
          candidates=('ring', 'direct'),
          topology=reductions.topology_of(['a'] * 2),
          small_bytes=256,
          piece_bytes=192,
        )
    choose.assert_called_once()

  def test_overlapping_output_is_refused(self):
    array = np.zeros(8)
    with (
      process_group.Rendezvous({0: '127.0.0.1:0'}, 0) as meeting,
      meeting.form() as group,
    ):
      with self.assertRaisesRegex(ValueError, 'overlap'):
        group.all_reduce(array[:5], out=array[3:])
      with self.assertRaisesRegex(ValueError, 'root'):
        group.broadcast(array, 1)
      with self.assertRaisesRegex(ValueError, 'scalar'):
        group.all_gather(np.array(1.0))
      with self.assertRaisesRegex(ValueError, 'scalar'):
        group.all_gather_equal(np.array(1.0))

  def test_name_that_is_no_string_is_refused(self):
    with (
      process_group.Rendezvous({0: '127.0.0.1:0'}, 0) as meeting,
      meeting.form() as group,
    ):
      for call in (
        group.barrier,
        functools.partial(group.all_gather, np.zeros(3)),
        functools.partial(group.all_gather_equal, np.zeros(3)),
        functools.partial(group.broadcast, np.zeros(3), 0),
      ):
        with self.assertRaisesRegex(ValueError, 'name=3.*a string'):
          call(name=3)


if __name__ == '__main__':
  absltest.main()
