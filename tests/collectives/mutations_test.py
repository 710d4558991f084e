"""A schedule with one thing wrong is refused, or proven to be right after all.

Some changes give another correct schedule: a copy may come from any rank that
has the sum already. A simulation recognises those: the sum of its inputs shows
how often each contribution went into it.
"""

import collections
import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tests.collectives.simulator import simulate
from tf_strategies import errors
from tf_strategies.collectives import schedule
from tf_strategies.collectives.algorithms import ALGORITHMS


def is_rejected(mutant):
  try:
    mutant.validate()
  except errors.ScheduleError:
    return True
  return False


def is_exact(mutant):
  """Returns whether every rank of a simulation gets every contribution once."""
  n, length = mutant.world_size, mutant.num_chunks
  # Six bits for each rank: the sum counts how often a contribution is in it.
  counts = [np.full(length, 1 << 6 * rank, np.int64) for rank in range(n)]
  # And positions, as a chunk could be right but in the wrong place.
  places = [rank * 1000 + np.arange(length) for rank in range(n)]
  return all(
    np.array_equal(output, np.sum(inputs, axis=0))
    for inputs in (counts, places)
    for output in simulate(mutant, inputs).outputs
  )


def replaced(original, index, *transfers):
  before, after = original.transfers[:index], original.transfers[index + 1 :]
  return dataclasses.replace(original, transfers=before + transfers + after)


def mutants_of_transfer(original, index):
  """Yields (kind, mutant) for every change to one transfer."""
  t = original.transfers[index]
  yield 'drop', replaced(original, index)
  yield 'duplicate', replaced(original, index, t, t)
  flipped = dataclasses.replace(t, reduce=not t.reduce)
  yield 'flip', replaced(original, index, flipped)
  for field, limit in (
    ('chunk', original.num_chunks),
    ('src', original.world_size),
    ('dst', original.world_size),
    ('round', original.num_rounds),
  ):
    for value in range(limit):
      changed = dataclasses.replace(t, **{field: value})
      if changed != t and changed.src != changed.dst:
        yield field, replaced(original, index, changed)


def swapped_rounds(original, one, other):
  names = {one: other, other: one}
  return dataclasses.replace(
    original,
    transfers=tuple(
      dataclasses.replace(t, round=names.get(t.round, t.round))
      for t in original.transfers
    ),
  )


def all_mutants(original):
  for index in range(len(original.transfers)):
    yield from mutants_of_transfer(original, index)
  for one, other in itertools.combinations(range(original.num_rounds), 2):
    yield 'swap', swapped_rounds(original, one, other)


ALL = [(name, name) for name in ALGORITHMS]


class SingleMutationTest(parameterized.TestCase):
  @parameterized.named_parameters(*ALL)
  def test_every_mutant_of_small_worlds(self, name):
    rejected = collections.Counter()
    accepted = collections.Counter()
    for world_size in (2, 3, 4):
      for kind, mutant in all_mutants(ALGORITHMS[name](world_size)):
        if is_rejected(mutant):
          rejected[kind] += 1
        else:
          accepted[kind] += 1
          self.assertTrue(is_exact(mutant), mutant)
    # The accepted ones are right: a copy from another holder of the sum, a
    # transfer or a round that could as well come at another time.
    self.assertContainsSubset(accepted, {'src', 'dst', 'round', 'swap'})
    for kind in ('drop', 'duplicate', 'flip', 'src', 'dst'):
      self.assertGreater(rejected[kind], 0)
    self.assertGreater(rejected.total(), accepted.total())


class RandomScheduleTest(parameterized.TestCase):
  @hypothesis.settings(deadline=None)
  @hypothesis.given(
    world_size=st.integers(2, 4),
    num_chunks=st.integers(1, 2),
    data=st.data(),
  )
  @pytest.mark.smoke
  def test_valid_means_exact(self, world_size, num_chunks, data):
    rank = st.integers(0, world_size - 1)
    transfer = st.builds(
      schedule.Transfer,
      round=st.integers(0, 3),
      src=rank,
      dst=rank,
      chunk=st.integers(0, num_chunks - 1),
      reduce=st.booleans(),
    ).filter(lambda t: t.src != t.dst)
    transfers = data.draw(st.lists(transfer, max_size=12))
    drawn = schedule.Schedule('drawn', world_size, num_chunks, transfers)
    self.assertTrue(is_rejected(drawn) or is_exact(drawn))


if __name__ == '__main__':
  absltest.main()
