"""Programs give the same results under every strategy as on one device.

Each program runs on one device and in the scope of each strategy. The test
compares the reports of `fit` and `evaluate`, the weights, the optimizer's state
and the predictions of every worker.

A row is a strategy and a program. Rows that need processes of their own share
them.
"""

import functools
import tempfile
from unittest import mock

import pytest
import tensorflow as tf

from tests import tf_case, tiers, virtual_devices
from tests.programs import (
  common,
  fits,
  inputs,
  own_steps,
  recommender,
  replicas,
  restores,
  runner,
  state,
  steps,
)
from tests.programs.cases import CASES, STRATEGIES
from tf_strategies.spmd import exchange

virtual_devices.configure()

# Takes three minutes on two idle cores.
_DEADLINE_SECONDS = 280
_MOST = 24  # Programs in one start.

_SMOKE = {
  'ring_mirrored': (
    'embedding_clipnorm',
    'quotient',
    'two_optimizers',
    'restored_momentum_eager',
  ),
  'central_storage': ('embedding_clipnorm', 'own_loop_branching'),
}
# One program for each mechanism. `make test_all` runs these, `make soak` runs all.
_SOME = (
  'accumulated',
  'masked',
  'quotient',
  'several_heads',
  'sharpness_aware_metrics',
  'two_optimizers',
  'endless_generator',
  'on_batch',
)
_OF_EACH = (
  *_SOME,
  'bools_and_strings',
  'clipped',
  'compiled',
  'supervised_contrastive',
  'gradient_penalty',
  'mean',
  'numpy_in_a_layer',
  'overwritten_metric',
  'positions_adam',
  'queue',
  'random_generator',
  'seeded_shuffle',
  'step_of_instance',
  'structures',
  'text_vectorization',
  'unknown_cardinality',
)
# Custom loops that call `strategy.step`.
_LOOPS = (
  'own_loop_accumulated',
  'own_loop_batch_normalization',
  'own_loop_branching',
)
# Whole models, which take ten seconds each.
_MODELS = ('resnet', 'custom_training', 'loop_over_workers')
# Programs whose state, rows or random numbers are divided between replicas.
_OF_REPLICAS = (
  'statistics',
  'batch_normalization',
  'overflow_of_the_first',
  'overflow_of_the_last',
  'predicted',
  'slices',
  'gathered',
  'reduced',
  'masks',
)
_OF_WORKERS = (
  *_OF_REPLICAS,
  *_LOOPS,
  # Workers share the files of callbacks.
  'all_callbacks',
  'backup_and_restore',
  'eager_after_others',
  'meetings',
  'read_by_the_chief',
  'managed',
)
_FITS = (
  'rows_69',
  'sync_batch_normalization',
  'run_eagerly_1_row',
  'lazy_rows',
  'accumulation_global_clipnorm',
  'ema_overwrite_accumulation_steps_per_execution',
  'mixed_float16_global_clipnorm',
  'sample_weight',
  'steps_per_execution',
  'backup_and_restore',
  'saved_and_loaded',
  'predicted_in_replicas',
  'restored_accumulation_fit',
  'restored_ema_inner_function',
  'restored_loss_scale_fit_subclass',
)
_OPTIONS = (
  *fits.PROGRAMS,
  *own_steps.PROGRAMS,
  *replicas.PROGRAMS,
  *restores.PROGRAMS,
)
_ON_WORKERS = (
  *steps.PROGRAMS,
  *inputs.PROGRAMS,
  *state.PROGRAMS,
  *_OPTIONS,
  *own_steps.LOOPS,
  'saved_and_loaded',
)
# Programs that differ on servers: control flow, rows, and kinds of writes.
_ON_SERVERS = (
  *fits.PROGRAMS,
  *own_steps.PROGRAMS,
  *own_steps.LOOPS,
  'restored_momentum_fit_subclass',
  'accumulated',
  'bools_and_strings',
  'class_weight',
  'supervised_contrastive',
  'decayed_and_averaged',
  'endless_generator',
  'lora',
  'mean',
  'metrics',
  'on_batch',
  'optimizer_adafactor',
  'optimizer_adamw',
  'optimizer_sgd_nesterov',
  'own_layer_and_metric',
  'py_dataset',
  'positions_adam',
  'queue',
  'ragged',
  'run_eagerly',
  'sample_weight',
  'saved_and_loaded',
  'several_heads',
  'sparse',
  'steps_per_execution',
  'two_optimizers',
)
_OFTEN_ON_SERVERS = (
  # Asynchronous steps report the logs of earlier batches.
  'all_callbacks',
  'rows_65',
  'loaded_model',
  'metrics',
  'positions_adam',
  'ragged',
  'restored_momentum_fit_subclass',
  'sparse',
  'text_vectorization',
  'two_optimizers',
)
_OPTIMIZERS = tuple(f'optimizer_{name}' for name in common.OPTIMIZERS)
_SHARDED = (*_OPTIMIZERS, *fits.TABLES, *fits.PROGRAMS)
_OFTEN_SHARDED = (
  *_OPTIMIZERS,
  'accumulation_global_clipnorm',
  'averages_in_evaluations',
  'compiled',
  'own_loop_accumulated',
  'ema_overwrite_accumulation_steps_per_execution',
  'embedding_clipnorm',
  'mixed_float16_global_clipnorm',
  'lazy_rows',
  'run_eagerly_1_row',
  'table_adagrad',
  'two_optimizers',
)
_ALSO_SHARDED = ('restored_accumulation_fit', 'saved_and_loaded')
_IN_PARTS = (
  'embedding_clipnorm',
  'embedding_steps_per_execution',
  'mixed_float16_embedding',
)


def _refusal(case, name) -> str | None:
  """Returns a pattern for the error with which a strategy rejects a program, or
  None.
  """
  if case.servers and name in (
    'recommender_adafactor',
    'recommender_lamb',
    'recommender_muon',
  ):
    optimizer = name.removeprefix('recommender_').title()
    if 'parts' in case.name:
      return f'Adam or SGD, got {optimizer} with partitioned variable'
  if case.workers and not case.servers and name == 'static_length':
    return r'tf\.shape\(x\)\[0\]'
  return None


# Rows that run in this process.


def _mark_in_process(case, name):
  if name in _SMOKE[case.name]:
    return tiers.smoke
  often = (*_SOME, *_LOOPS, *_OF_REPLICAS)
  if case is STRATEGIES[0]:
    often = (*often, *_OF_EACH, *_MODELS, *_FITS)
  else:
    often = (*often, 'restored_ema_function')
  return tiers.unmarked if name in often else tiers.soak


_IN_PROCESS = [
  *[
    _mark_in_process(case, name)(f'{case.name}_{name}', case, name)
    for case in STRATEGIES
    for name in (*runner.PAGE, *_OPTIONS, *own_steps.LOOPS)
  ],
  *[
    tiers.soak(f'{case}_{name}', CASES[case], name)
    for case in ('central_storage_of_2', 'sharded')
    for name in (*fits.PROGRAMS, *fits.TABLES, *_ALSO_SHARDED)
    if (case, name) not in [('sharded', often) for often in _OFTEN_SHARDED]
  ],
  *[(f'sharded_{name}', CASES['sharded'], name) for name in _OFTEN_SHARDED],
]


# Rows (case, program) in other processes, grouped by start.


def _groups(case, names):
  names = list(names)
  count = -(-len(names) // _MOST)
  return [tuple((case, n) for n in names[i::count]) for i in range(count)]


_STARTS = {
  tiers.smoke: (
    (
      ('ring_2x2', 'sync_batch_normalization'),
      ('ring_2x2', 'restored_ema_function'),
      ('ring_2x1_sharded', 'optimizer_adam'),
      ('ring_2x1_sharded', 'accumulated'),
    ),
    # TensorFlow's runtime keeps its port, so no other rows can follow.
    (('collective_2x1', 'sync_batch_normalization'),),
    (('servers_sync_2', 'guide'),),
  ),
  tiers.unmarked: (
    tuple(
      ('ring_2x1_unlike', name)
      for name in (*_OF_EACH, 'run_eagerly_1_row', 'stateful_rnn')
    ),
    tuple(('ring_2x2', name) for name in _OF_WORKERS),
    (
      *[('servers_sync_2', name) for name in _OFTEN_ON_SERVERS],
      ('servers_sync_2_in_2_parts', 'recommender_adagrad'),
      ('servers_sync_2_in_2_parts', 'recommender_lazy_momentum'),
      (
        'servers_sync_2_in_2_parts',
        'recommender_adagrad_where_repeated_rows_are_lost',
      ),
      ('servers_sync_2', 'recommender_sgd_where_shares_count_alike'),
    ),
    tuple(('servers_sync_2', name) for name in own_steps.LOOPS),
    (
      ('servers_async_1_in_2_parts', 'embedding_clipnorm'),
      ('servers_async_1', 'ragged_by_workers'),
      ('servers_async_1', 'sparse_by_workers'),
      ('servers_async_1_in_2_parts', 'recommender_scaled_lazy_adam'),
      ('servers_bounded_1_in_2_parts', 'recommender_clipnorm'),
    ),
  ),
  tiers.soak: (
    *_groups('ring_2x1', _ON_WORKERS),
    *_groups('ring_2x2', _ON_WORKERS),
    *_groups('collective_2x1', _ON_WORKERS),
    *(
      group
      for case in (
        'ring_3x1',
        'mpi_2x1',
        'collective_1x1',
        'collective_2x2',
        'ring_2x1_unlike',
        'collective_2x1_unlike',
      )
      for group in _groups(case, _OPTIONS)
    ),
    *_groups('ring_2x2_sharded', fits.PROGRAMS),
    *_groups('ring_3x1_sharded', _SHARDED),
    *(
      group
      for mode in ('async_1', 'sync_1', 'sync_2')
      for group in _groups(f'servers_{mode}', _ON_SERVERS)
    ),
    *(
      group
      for mode in ('async_1', 'bounded_1', 'sync_1', 'sync_2')
      for parts in ('', '_in_2_parts')
      for group in _groups(f'servers_{mode}{parts}', recommender.PROGRAMS)
    ),
    (
      *(('servers_async_1_in_2_parts', name) for name in _IN_PARTS[1:]),
      *(('servers_async_1_in_3_parts', name) for name in _IN_PARTS),
      ('servers_async_1', 'recommender_adam_where_repeated_rows_are_lost'),
    ),
    (
      *(('servers_sync_2_in_2_parts', name) for name in _IN_PARTS),
      (
        'servers_sync_2_in_2_parts',
        'recommender_lazy_adam_where_repeated_rows_are_lost',
      ),
    ),
  ),
}
_often = {row for tier in list(_STARTS)[:2] for g in _STARTS[tier] for row in g}
_IN_PROCESSES = [
  mark(f'{case}_{name}', CASES[case], name, group)
  for mark, groups in _STARTS.items()
  for group in groups
  for case, name in group
  if mark is not tiers.soak or (case, name) not in _often
]


@functools.cache
def _results(rows):
  """Starts the workers once and returns each program's results on each worker."""
  with tempfile.TemporaryDirectory() as directory:
    for outcome in runner.start(rows, directory, _DEADLINE_SECONDS):
      print(outcome.rank, outcome.exitcode, outcome.error_text)
    return {row: runner.read(directory, *row) for row in rows}


class ProgramsTest(tf_case.TestCase):
  def assert_equal(self, one, other, name):
    """Checks that two structures of numbers agree within the promised limit."""
    self.assertLessEqual(runner.difference(one, other), runner.limit_of(name))

  @tiers.named_parameters(*_IN_PROCESS)
  def test_equals_one_device(self, case, name):
    found = runner.run_checked(name, case.create())
    self.assert_equal(runner.one_device(name), found, name)

  @tiers.named_parameters(*_IN_PROCESSES)
  def test_in_processes_equals_one_device(self, case, name, group):
    if case.link == 'mpi' and runner.mpiexec() is None:
      self.skipTest("no mpi4py and mpiexec: pip install '.[mpi]'")
    results = _results(group)
    found = results[case.name, name]
    original = name.partition('_where_')[0]
    refusal = _refusal(case, name)
    for each in found:
      if each is None:
        failures = [f for fs in results.values() for f in fs]
        failures = [f for f in failures if isinstance(f, runner.Failure)]
        self.fail(f'an earlier program failed: {failures[:1]}')
      if refusal is not None:
        self.assertTrue(each.is_typed, each)
        self.assertRegex(each.text, f'(?s){refusal}')
        continue
      if isinstance(each, runner.Failure):
        raise AssertionError(each.text)
      want = runner.one_device(original)
      if name != original:
        difference = runner.difference(want, each)
        self.assertGreater(difference, 100 * runner.limit_of(name))
        continue
      self.assert_equal(want, each, name)
      if not name.startswith('mixed_'):
        # All workers must agree in every bit.
        self.assertEqual(runner.difference(found[0], each), 0)

  @pytest.mark.smoke
  def test_wrong_factor_is_detected(self):
    """Checks that the comparison detects a factor of the number of replicas."""
    with self.assertRaises(AssertionError):
      self.assert_equal(
        runner.one_device('mean'),
        runner.one_device('sum_by_batch_size'),
        'mean',
      )

  @pytest.mark.smoke
  def test_wrong_sum_is_detected(self):
    add = exchange.Exchange.add

    def wrong(self, *args):
      return [
        [t * 1.001 if t.dtype.is_floating else t for t in sums]
        for sums in add(self, *args)
      ]

    with mock.patch.object(exchange.Exchange, 'add', wrong):
      # Adam hides a constant factor.
      found = runner.run('rows_69', STRATEGIES[0].create())
    with self.assertRaises(AssertionError):
      self.assert_equal(runner.one_device('rows_69'), found, 'rows_69')

  def test_tf32_products_are_close_to_one_device(self):
    """TF32 products have 10 bits and need a GPU."""
    if virtual_devices.KIND != 'GPU':
      self.skipTest('no GPU: CPUs have no TF32')
    experimental = tf.config.experimental
    experimental.enable_tensor_float_32_execution(True)
    self.addCleanup(experimental.enable_tensor_float_32_execution, False)
    for case in STRATEGIES:
      found = runner.run_checked('rows_69', case.create())
      self.assertLess(runner.difference(runner.run('rows_69'), found), 5e-3)


if __name__ == '__main__':
  tf.test.main()
