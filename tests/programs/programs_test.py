"""Programs that know of no strategy give what they give on one device.

Each runs as it is on one device and under a strategy: only the scope is added.
What `fit` and `evaluate` report, weights and predictions are compared.
"""

import contextlib
import functools
import traceback

import keras
import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import processes, tiers
from tests.conformance import harness, multi_worker
from tests.conformance.multi_worker import WorkerCase
from tests.programs import (
  generative,
  inputs,
  models,
  objectives,
  steps,
  tables,
  training,
)

# Three minutes on two quiet cores.
_DEADLINE_SECONDS = 280

PROGRAMS = {
  **steps.PROGRAMS,
  **inputs.PROGRAMS,
  **models.PROGRAMS,
  **generative.PROGRAMS,
  **objectives.PROGRAMS,
  **training.PROGRAMS,
  **tables.PROGRAMS,
}
# Whole models take ten seconds each: `make soak` trains them all.
_PROGRAMS_OF_WORKERS = {**steps.PROGRAMS, **inputs.PROGRAMS}
_SHORT_PROGRAMS = (
  *_PROGRAMS_OF_WORKERS,
  'bilstm',
  'clipped_by_hand',
  'resnet',
  'vae',
)
_QUICK = (
  'accumulated',
  'masked',
  'quotient',
  'several_outputs',
  'two_optimizers',
  'endless_generator',
  'on_batch',
)
# One of each mechanism: what `make test_all` runs beside `ring_mirrored`.
_OF_EACH = (
  *_QUICK,
  'bools_and_strings',
  'clipped',
  'compiled',
  'contrastive',
  'gradient_penalty',
  'inputs_alone',
  'mean',
  'positions_adam',
  'seeded_shuffle',
  'structures',
  'text',
)
# Minutes each.
_SLOW = ('mobilenet', 'efficientnet')
# What is computed with 16 bits, in which sums depend on their order.
_SHORT = ('mixed_float16', 'mixed_bfloat16')
_WORKERS = (
  WorkerCase('ring_2x1', 'multi_worker_ring', workers=2, devices=1),
  WorkerCase('collective_2x1', 'multi_worker_collective', 2, devices=1),
  WorkerCase('ring_2x2', 'multi_worker_ring', workers=2, devices=2),
)


def _rows(cases, mark, programs):
  return [
    mark(case, name)(f'{case.name}_{name}', case, name)
    for case in cases
    for name in programs
  ]


def _mark_in_process(case, name):
  if case is harness.STRATEGIES[0] and name in _QUICK:
    return tiers.quick
  is_first = case is harness.STRATEGIES[0]
  often = _SHORT_PROGRAMS if is_first else _OF_EACH
  return tiers.full if name in often else tiers.soak


def _mark_of_workers(case, name):
  often = case is _WORKERS[0] and name in _OF_EACH
  return tiers.full if often else tiers.soak


def _run(name, strategy=None):
  keras.backend.clear_session()
  keras.utils.set_random_seed(1)
  with strategy.scope() if strategy else contextlib.nullcontext():
    return PROGRAMS[name]()


@functools.cache
def _one_device(name):
  return _run(name)


def _work(rank, case, names):
  """What one worker finds out; the error of a program in place of its result."""
  del rank
  strategy = multi_worker.create(case)
  results = {}
  for name in names:
    try:
      results[name] = _run(name, strategy)
    except Exception:
      results[name] = traceback.format_exc()
      break  # The others would wait for this worker.
  strategy.close()
  return results


@functools.cache
def _results(case, names):
  return processes.run_workers(
    _work, case.workers, args=(case, names), deadline=_DEADLINE_SECONDS
  )


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
  def assert_equal(self, one, other, name=None):
    """Compares the numbers of two structures that may be lists or tuples."""
    one, other = tf.nest.flatten(one), tf.nest.flatten(other)
    self.assertLen(other, len(one))
    limits = (2e-3, 2e-3) if name in _SHORT else (1e-5, 1e-6)
    for want, found in zip(one, other, strict=True):
      self.assertAllClose(want, found, *limits)

  @tiers.named_parameters(
    *_rows(harness.STRATEGIES, _mark_in_process, PROGRAMS)
  )
  def test_equals_one_device(self, case, name):
    want = _one_device(name)
    found = _run(name, case.create())
    self.assert_equal(want, found, name)

  @tiers.named_parameters(
    *_rows(_WORKERS, _mark_of_workers, _PROGRAMS_OF_WORKERS)
  )
  @pytest.mark.multi_process
  def test_several_workers_equal_one_device(self, case, name):
    # All in one run of the workers, which takes long to start.
    names = _OF_EACH if name in _OF_EACH else tuple(_PROGRAMS_OF_WORKERS)
    found = _results(case, names)
    self.assertLen(found, case.workers)
    want = _one_device(name)
    for result in found:
      if isinstance(result.get(name), str):
        raise AssertionError(result[name])
      self.assertIn(name, result)
      self.assert_equal(want, result[name], name)

  def test_another_result_is_found(self):
    """The comparison tells programs apart that differ by a number of replicas."""
    with self.assertRaises(AssertionError):
      self.assert_equal(_run('mean'), _run('sum_by_batch_size'))


if __name__ == '__main__':
  tf.test.main()
