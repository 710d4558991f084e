"""Programs that know of no strategy give what they give on one device.

Each runs as it is on one device and under a strategy: only the scope is added.
What `fit` and `evaluate` report, weights and predictions are compared.
"""

import functools
import tempfile

import pytest
import tensorflow as tf
from absl.testing import parameterized

from tests import processes, tiers
from tests.conformance import harness
from tests.programs import inputs, runner, state, steps

# Three minutes on two quiet cores.
_DEADLINE_SECONDS = 280

_PROGRAMS_OF_WORKERS = {**steps.PROGRAMS, **inputs.PROGRAMS, **state.PROGRAMS}
# Refused there.
del _PROGRAMS_OF_WORKERS['static_length']
_SMOKE = ('quotient', 'two_optimizers')
_SOME = (
  'accumulated',
  'masked',
  'quotient',
  'several_outputs',
  'sharpness_aware',
  'two_optimizers',
  'endless_generator',
  'on_batch',
)
# One of each mechanism: what `make test_all` runs; `make soak` runs them all.
_OF_EACH = (
  *_SOME,
  'bools_and_strings',
  'clipped',
  'compiled',
  'contrastive',
  'gradient_penalty',
  'inputs_alone',
  'mean',
  'numpy_in_a_layer',
  'overwritten_metric',
  'positions_adam',
  'queue',
  'random_generator',
  'seeded_shuffle',
  'structures',
  'text',
)
# Whole models, of which each takes ten seconds.
_MODELS = ('resnet', 'custom_training', 'loop_over_workers')
# Minutes each.
_SLOW = ('mobilenet', 'efficientnet')


def _rows(cases, mark, programs):
  return [
    mark(case, name)(f'{case.name}_{name}', case, name)
    for case in cases
    for name in programs
  ]


def _mark_in_process(case, name):
  is_first = case is harness.STRATEGIES[0]
  if is_first and name in _SMOKE:
    return tiers.smoke
  often = (*_OF_EACH, *_MODELS) if is_first else _SOME
  return tiers.unmarked if name in often else tiers.soak


def _mark_of_workers(case, name):
  often = case is runner.WORKERS[0] and name in _OF_EACH
  return tiers.unmarked if often else tiers.soak


@functools.cache
def _results(case, names):
  """For each worker, what each program returned or raised."""
  with tempfile.TemporaryDirectory() as directory:
    processes.run_workers(
      runner.work,
      case.workers,
      args=(case, names, directory),
      deadline=_DEADLINE_SECONDS,
    )
    return [
      {name: runner.read(directory, rank, name) for name in names}
      for rank in range(case.workers)
    ]


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
  def assert_equal(self, one, other, name=None):
    """The numbers of two structures are as near as promised."""
    found = runner.difference(one, other)
    self.assertLessEqual(found, runner.limit_of(name))

  @tiers.named_parameters(
    *_rows(harness.STRATEGIES, _mark_in_process, runner.PROGRAMS)
  )
  def test_equals_one_device(self, case, name):
    found = runner.run(name, case.create())
    self.assert_equal(runner.one_device(name), found, name)

  @tiers.named_parameters(
    *_rows(runner.WORKERS, _mark_of_workers, _PROGRAMS_OF_WORKERS)
  )
  def test_several_workers_equal_one_device(self, case, name):
    # All in one run of the workers, which takes long to start.
    names = _OF_EACH if name in _OF_EACH else tuple(_PROGRAMS_OF_WORKERS)
    for result in _results(case, names):
      self.assertIsNotNone(result[name], 'an earlier program failed')
      if isinstance(result[name], runner.Failure):
        raise AssertionError(result[name].text)
      self.assert_equal(runner.one_device(name), result[name], name)

  @tiers.named_parameters(tiers.soak('ring_2x1', runner.WORKERS[0]))
  def test_workers_refuse_a_step_that_needs_the_length_of_a_batch(self, case):
    for result in _results(case, ('static_length',)):
      self.assertTrue(result['static_length'].is_typed)
      self.assertIn('tf.shape(x)[0]', result['static_length'].text)

  @pytest.mark.smoke
  def test_another_result_is_found(self):
    """The comparison tells programs apart that differ by a number of replicas."""
    with self.assertRaises(AssertionError):
      self.assert_equal(
        runner.one_device('mean'), runner.one_device('sum_by_batch_size')
      )


if __name__ == '__main__':
  tf.test.main()
