"""`fit`, `evaluate` and `predict` on several workers equal one device's."""

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests.conformance import multi_worker
from tests.conformance.multi_worker import WorkerCase

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

_DEADLINE_SECONDS = 280

CASES = (
  WorkerCase('collective_2x1', 'multi_worker_collective', 2, devices=1),
  WorkerCase('collective_2x2', 'multi_worker_collective', 2, devices=2),
  WorkerCase('ring_2x1', 'multi_worker_ring', workers=2, devices=1),
  WorkerCase('ring_2x2', 'multi_worker_ring', workers=2, devices=2),
  WorkerCase('ring_3x1', 'multi_worker_ring', workers=3, devices=1),
)


class MultiWorkerTest(
  multi_worker.MultiWorkerConformanceTest, parameterized.TestCase
):
  @parameterized.product([{'case': c} for c in CASES], part=(0, 1, 2, 3))
  def test_equals_one_device(self, case, part):
    names = sorted(multi_worker.features())[part::4]
    by_worker = multi_worker.run(case, names, _DEADLINE_SECONDS)
    self.assertLen(by_worker, case.workers)
    for name in names:
      with self.subTest(name):
        self.check_workers(name, [results[name] for results in by_worker])


if __name__ == '__main__':
  tf.test.main()
