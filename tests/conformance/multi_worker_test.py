"""`fit`, `evaluate` and `predict` on several workers equal one device's.

Two rows for `make test`, rows in which several workers could differ from one
process for `make test_all`; other kinds of workers and the whole table in the soak
run.
"""

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import tiers
from tests.conformance import multi_worker
from tests.conformance.multi_worker import WorkerCase

_DEADLINE_SECONDS = 280
_PARTS = 8

CASES = (WorkerCase('ring_2x2', 'multi_worker_ring', workers=2, devices=2),)
# The same code with another number of workers, or over another link.
LIKE_THEM = (
  WorkerCase('collective_2x1', 'multi_worker_collective', 2, devices=1),
  WorkerCase('ring_3x1', 'multi_worker_ring', workers=3, devices=1),
  WorkerCase('mpi_2x1', 'multi_worker_ring', 2, devices=1, link='mpi'),
)
# What those cover together.
BETWEEN = (
  WorkerCase('ring_2x1', 'multi_worker_ring', workers=2, devices=1),
  WorkerCase('collective_2x2', 'multi_worker_collective', 2, devices=2),
)
# Workers that differ on purpose in garbage, hash seeds and lifetimes of objects.
UNLIKE = (
  WorkerCase('ring_2x1_unlike', 'multi_worker_ring', 2, 1, are_unlike=True),
  WorkerCase(
    'collective_2x1_unlike', 'multi_worker_collective', 2, 1, are_unlike=True
  ),
)
# An eager step finds the model before it, which one worker still has.
AFTER_ANOTHER = ('sgd', 'run_eagerly_1_row')
# Control flow, uneven and rowless batches, slices, collectives in the forward
# pass.
SOME = (
  'embedding',
  'ema_overwrite_accumulation_steps_per_execution',
  'last_batch_of_5_rows',
  'sync_batch_normalization_1_row',
)
# What `make test` runs.
FEW = ('sync_batch_normalization_1_row',)


def _parts(names):
  return [sorted(names)[part::_PARTS] for part in range(_PARTS)]


class MultiWorkerTest(
  multi_worker.MultiWorkerConformanceTest, parameterized.TestCase
):
  @parameterized.named_parameters(*[(c.name, c) for c in CASES])
  @pytest.mark.soak
  def test_others_equal_one_device(self, case):
    self.assert_features(case, [name for name in SOME if name not in FEW])

  @tiers.named_parameters(
    *[tiers.smoke(c.name, c) for c in CASES],
    tiers.smoke('collective_2x1', LIKE_THEM[0]),
    tiers.soak(
      'collective_1x1', WorkerCase('', 'multi_worker_collective', 1, devices=1)
    ),
    *tiers.every(tiers.soak, [(c.name, c) for c in LIKE_THEM[1:]]),
  )
  def test_few_equal_one_device(self, case):
    self.assert_features(case, FEW)

  @tiers.named_parameters(
    (UNLIKE[0].name, UNLIKE[0], AFTER_ANOTHER),
    tiers.soak('collective', UNLIKE[1], AFTER_ANOTHER),
    *[
      tiers.soak(f'part_{part}', UNLIKE[0], names)
      for part, names in enumerate(_parts(multi_worker.features()))
    ],
  )
  def test_unlike_workers_equal_one_device(self, case, names):
    self.assert_features(case, names)

  @parameterized.named_parameters(
    *[(c.name, c) for c in (*LIKE_THEM, *BETWEEN)]
  )
  @pytest.mark.soak
  def test_some_between_equal_one_device(self, case):
    self.assert_features(case, SOME)

  @parameterized.product(
    [{'case': c} for c in (*CASES, *LIKE_THEM, *BETWEEN)],
    part=tuple(range(_PARTS)),
  )
  @pytest.mark.soak
  def test_the_rest_equals_one_device(self, case, part):
    rest = set(multi_worker.features()) - set(SOME)
    self.assert_features(case, _parts(rest)[part])

  def assert_features(self, case, names):
    if case.link == 'mpi' and multi_worker.mpiexec() is None:
      self.skipTest("no mpi4py and mpiexec: pip install '.[mpi]'")
    by_worker = multi_worker.run(case, names, _DEADLINE_SECONDS)
    self.assertLen(by_worker, case.workers)
    for name in names:
      with self.subTest(name):
        self.assert_workers(name, [results[name] for results in by_worker])


if __name__ == '__main__':
  tf.test.main()
