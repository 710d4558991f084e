"""Permutation steps move exactly what the schedule says, one chunk a rank."""

import collections
import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies import errors
from tf_strategies.collectives import (
  ALGORITHMS,
  Schedule,
  Transfer,
  chunk_sizes,
  hierarchical_all_reduce,
  ring_all_reduce,
  simulate,
)
from tf_strategies.collectives.permutation import (
  NO_CHUNK,
  permutation_rounds,
)

WORLD_SIZES = (*range(1, 18), 32)
ALL = [(name, name) for name in ALGORITHMS]


def play(rounds, inputs, num_chunks):
  """Runs permutation steps as a machine would: tables by rank, and no more.

  A rank that is nobody's target receives zeros, as on a TPU; what it makes of
  them is its table's business.
  """
  ends = np.cumsum([0, *chunk_sizes(inputs[0].size, num_chunks)])
  state = [
    [np.array(flat[a:b]) for a, b in itertools.pairwise(ends)]
    for flat in inputs
  ]
  for steps in rounds:
    before = [list(chunks) for chunks in state]
    for step in steps:
      received = {
        dst: before[src][step.send_chunk[src]]
        for src, dst in step.source_target_pairs
      }
      for rank, chunk in enumerate(step.receive_chunk):
        if chunk == NO_CHUNK:
          continue
        came = received.get(rank, np.zeros_like(state[rank][chunk]))
        state[rank][chunk] = state[rank][chunk] + came if step.reduce else came
  return [np.concatenate(chunks) for chunks in state]


def transfers_of(rounds):
  return sorted(
    Transfer(index, src, dst, step.send_chunk[src], step.reduce)
    for index, steps in enumerate(rounds)
    for step in steps
    for src, dst in step.source_target_pairs
  )


def distinct_inputs(world_size, length):
  """Tells ranks and positions apart."""
  return [rank * 100_000 + np.arange(length) for rank in range(world_size)]


def assert_pairs_are_valid(test, schedule, rounds):
  for step in (step for steps in rounds for step in steps):
    sources = [src for src, _ in step.source_target_pairs]
    targets = [dst for _, dst in step.source_target_pairs]
    test.assertLen(set(sources), len(sources))
    test.assertLen(set(targets), len(targets))
    test.assertLen(step.send_chunk, schedule.world_size)
    test.assertLen(step.receive_chunk, schedule.world_size)
    for rank in range(schedule.world_size):
      test.assertEqual(step.send_chunk[rank] != NO_CHUNK, rank in sources)
      test.assertEqual(step.receive_chunk[rank] != NO_CHUNK, rank in targets)
    for src, dst in step.source_target_pairs:
      test.assertEqual(step.send_chunk[src], step.receive_chunk[dst])
    test.assertEqual(step.is_full, len(targets) == schedule.world_size)


class EveryBuilderTest(parameterized.TestCase):
  @parameterized.named_parameters(*ALL)
  def test_equals_the_simulator(self, name):
    for world_size in WORLD_SIZES:
      schedule = ALGORITHMS[name](world_size)
      rounds = permutation_rounds(schedule)
      assert_pairs_are_valid(self, schedule, rounds)
      self.assertEqual(transfers_of(rounds), list(schedule.transfers))
      for length in (0, 1, world_size, 3 * world_size + 1):
        inputs = distinct_inputs(world_size, length)
        expected = simulate(schedule, inputs).outputs
        actual = play(rounds, inputs, schedule.num_chunks)
        np.testing.assert_array_equal(actual, expected, strict=True)

  @parameterized.named_parameters(*ALL)
  def test_takes_as_few_steps_as_there_can_be(self, name):
    for world_size in WORLD_SIZES:
      schedule = ALGORITHMS[name](world_size)
      rounds = permutation_rounds(schedule)
      for transfers, steps in zip(schedule.rounds(), rounds, strict=True):
        sends = collections.Counter(t.src for t in transfers)
        receives = collections.Counter(t.dst for t in transfers)
        fewest = max(*sends.values(), *receives.values())
        self.assertLen(steps, fewest, f'{world_size} ranks')

  def test_a_ring_is_one_rotation_a_round(self):
    for world_size in WORLD_SIZES[1:]:
      rounds = permutation_rounds(ring_all_reduce(world_size))
      self.assertLen(rounds, 2 * (world_size - 1))
      for (step,) in rounds:
        self.assertEqual(
          step.source_target_pairs,
          tuple((r, (r + 1) % world_size) for r in range(world_size)),
        )
        self.assertTrue(step.is_full)

  def test_one_rank_has_nothing_to_do(self):
    for builder in ALGORITHMS.values():
      self.assertEqual(permutation_rounds(builder(1)), ())


@st.composite
def schedules(draw):
  """Any rounds without races, not only those of an all-reduce."""
  world_size = draw(st.integers(2, 7))
  num_chunks = draw(st.integers(1, 5))
  ranks = st.integers(0, world_size - 1)
  transfers = []
  for round_ in range(draw(st.integers(1, 4))):
    drawn = draw(
      st.lists(
        st.tuples(ranks, ranks, st.integers(0, num_chunks - 1), st.booleans()),
        min_size=1,
        max_size=12,
      )
    )
    writers = collections.defaultdict(list)
    for src, dst, chunk, reduce in drawn:
      if src != dst and (src, dst, chunk) not in {
        (t.src, t.dst, t.chunk) for t in writers[dst, chunk]
      }:
        transfer = Transfer(round_, src, dst, chunk, reduce)
        writers[dst, chunk].append(transfer)
    for several in writers.values():
      adds = [t for t in several if t.reduce]
      transfers += several if len(several) == 1 else adds
  return Schedule('drawn', world_size, num_chunks, tuple(transfers))


class AnyScheduleTest(parameterized.TestCase):
  @hypothesis.given(schedules(), st.integers(0, 30))
  @pytest.mark.smoke
  def test_equals_the_simulator(self, schedule, length):
    rounds = permutation_rounds(schedule)
    assert_pairs_are_valid(self, schedule, rounds)
    inputs = distinct_inputs(schedule.world_size, length)
    np.testing.assert_array_equal(
      play(rounds, inputs, schedule.num_chunks),
      simulate(schedule, inputs).outputs,
      strict=True,
    )

  @hypothesis.given(
    st.sampled_from(sorted(ALGORITHMS)), st.sampled_from(WORLD_SIZES), st.data()
  )
  @hypothesis.settings(max_examples=40)
  def test_a_lost_transfer_is_seen_in_the_result(self, name, size, data):
    schedule = ALGORITHMS[name](size)
    hypothesis.assume(schedule.transfers)
    lost = data.draw(st.integers(0, len(schedule.transfers) - 1))
    others = schedule.transfers[:lost] + schedule.transfers[lost + 1 :]
    rounds = permutation_rounds(dataclasses.replace(schedule, transfers=others))
    inputs = distinct_inputs(size, 2 * schedule.num_chunks)
    outputs = play(rounds, inputs, schedule.num_chunks)
    self.assertFalse(
      all(np.array_equal(o, np.sum(inputs, axis=0)) for o in outputs)
    )

  def test_several_chunks_to_one_rank_take_several_steps(self):
    transfers = [Transfer(0, 0, 1, chunk, True) for chunk in range(3)]
    ((first, *others),) = permutation_rounds(
      Schedule('three', 2, 3, tuple(transfers))
    )
    self.assertEqual(first.source_target_pairs, ((0, 1),))
    self.assertEqual(first.send_chunk, (0, NO_CHUNK))
    self.assertEqual(first.receive_chunk, (NO_CHUNK, 0))
    self.assertEqual([s.receive_chunk[1] for s in others], [1, 2])

  def test_adding_and_overwriting_are_separate_steps(self):
    both = Schedule(
      'both', 2, 1, (Transfer(0, 0, 1, 0, True), Transfer(0, 1, 0, 0, False))
    )
    ((add, overwrite),) = permutation_rounds(both)
    self.assertTrue(add.reduce)
    self.assertFalse(overwrite.reduce)

  def test_is_deterministic(self):
    schedule = hierarchical_all_reduce(12, 4)
    shuffled = Schedule(
      schedule.name,
      schedule.world_size,
      schedule.num_chunks,
      tuple(reversed(schedule.transfers)),
    )
    self.assertEqual(permutation_rounds(schedule), permutation_rounds(shuffled))


class ErrorsTest(parameterized.TestCase):
  def test_not_a_schedule(self):
    with self.assertRaisesRegex(errors.ScheduleError, "'ring'.*a builder"):
      permutation_rounds('ring')

  @parameterized.parameters(
    (Transfer(0, 0, 2, 0, True), r'dst \(2\)'),
    (Transfer(0, 0, 1, 1, True), r'chunk \(1\)'),
    (Transfer(0, 1, 1, 0, True), 'send to itself'),
  )
  def test_out_of_range(self, transfer, message):
    with self.assertRaisesRegex(errors.ScheduleError, message):
      permutation_rounds(Schedule('wrong', 2, 1, (transfer,)))

  @parameterized.parameters((True, False), (False, True), (False, False))
  def test_a_race(self, first, second):
    race = Schedule(
      'race',
      3,
      1,
      (Transfer(0, 0, 2, 0, first), Transfer(0, 1, 2, 0, second)),
    )
    with self.assertRaisesRegex(errors.ScheduleError, 'src=1.*src=0.*write'):
      permutation_rounds(race)


if __name__ == '__main__':
  absltest.main()
