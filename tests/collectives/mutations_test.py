"""A schedule with one change is refused, or a simulation shows that it is correct.

Some changes give another correct schedule: a copy may come from any rank that
already has the sum. A simulation detects this: the sum shows how often each
contribution was added.
"""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tests.collectives import proof
from tests.collectives.simulator import simulate
from tf_strategies.collectives.algorithms import ALGORITHMS


def is_rejected(mutant):
  try:
    proof.validate(mutant)
  except proof.WrongScheduleError:
    return True
  return False


def is_exact(mutant):
  """Returns whether every rank of a simulation gets every contribution once."""
  n, length = mutant.world_size, mutant.num_chunks
  # Six bits for each rank count how often its contribution was added. The lower bits
  # hold the position, since a correct chunk could be at a wrong position.
  inputs = [(1 << 6 * rank + 10) + np.arange(length) for rank in range(n)]
  expected = np.sum(inputs, axis=0)
  outputs = simulate(mutant, inputs).outputs
  return all(np.array_equal(output, expected) for output in outputs)


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


class SingleMutationTest(parameterized.TestCase):
  @parameterized.parameters(*ALGORITHMS)
  @pytest.mark.smoke
  def test_every_mutant_is_refused_or_exact(self, name):
    rejected = collections.Counter()
    accepted = collections.Counter()
    for world_size in (2, 3, 4):
      for kind, mutant in all_mutants(ALGORITHMS[name](world_size)):
        if is_rejected(mutant):
          rejected[kind] += 1
        else:
          accepted[kind] += 1
          self.assertTrue(is_exact(mutant), mutant)
    # Accepted mutants are correct: they copy from another rank that has the sum,
    # or reorder transfers or rounds that are independent.
    self.assertContainsSubset(accepted, {'src', 'dst', 'round', 'swap'})
    for kind in ('drop', 'duplicate', 'flip', 'src', 'dst'):
      self.assertGreater(rejected[kind], 0)
    self.assertGreater(rejected.total(), accepted.total())


if __name__ == '__main__':
  absltest.main()
