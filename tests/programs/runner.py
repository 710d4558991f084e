"""Runs programs on one device and under strategies, and compares the results.

Programs use the strategy of their scope. Custom loops call
`tf.distribute.get_strategy()`, which also works on one device.

Workers that mpiexec starts run `python -m tests.programs.runner request`.
"""

import dataclasses
import functools
import importlib.util
import os
import pickle
import shutil
import sys
import traceback
from unittest import mock

import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from benchmarks import processes as commands
from tests import parameter_servers, processes, virtual_devices
from tests.programs import (
  common,
  fits,
  generative,
  inputs,
  loops,
  models,
  objectives,
  own_steps,
  recommender,
  replicas,
  restores,
  state,
  steps,
  tables,
  training,
)
from tests.programs.cases import CASES
from tf_strategies.strategies.mirrored import sharded_state

_ON_READ = tf.VariableSynchronization.ON_READ
# The programs in docs/programs.md.
PAGE = {
  **steps.PROGRAMS,
  **state.PROGRAMS,
  **inputs.PROGRAMS,
  **models.PROGRAMS,
  **generative.PROGRAMS,
  **objectives.PROGRAMS,
  **training.PROGRAMS,
  **tables.PROGRAMS,
  **loops.PROGRAMS,
}
PROGRAMS = {
  **PAGE,
  **fits.PROGRAMS,
  **fits.TABLES,
  **replicas.PROGRAMS,
  **restores.PROGRAMS,
  **tables.BY_WORKERS,
  **own_steps.PROGRAMS,
  **own_steps.LOOPS,
  **recommender.PROGRAMS,
  **recommender.MUTATED,
}


def shares_batches(strategy) -> bool:
  """Returns whether each batch is split among several workers."""
  return (
    strategy.options.mode == 'sync' and len(strategy.cluster.jobs['worker']) > 1
  )


def shares_rows(strategy) -> bool:
  """Returns whether synchronous workers share the rows of every step so far."""
  steps = {step for step, *_ in strategy.engine._functions}
  found = [p for step in steps for p in step.powers.values()]
  return bool(found) and not any(isinstance(p, str) for p in found)


def run(name, strategy=None):
  """Returns a program's results, under a strategy or on one device."""
  return common.run(PROGRAMS[name], strategy)


@functools.cache
def one_device(name):
  """Returns a program's results on one device."""
  return run(name)


# Programs of `fits` without optimizer state that can be sharded.
_UNSHARDED = (
  'clipvalue',
  'overflow_of_the_first',
  'overflow_of_the_last',
  'predicted',
  'statistics',
)


def _run_sharded(name, strategy):
  """Returns a program's results, and checks that replicas shard its state."""
  shards = strategy.extended.state_shards
  with (
    # The programs are small.
    mock.patch.object(sharded_state, '_SHORTEST', 4),
    mock.patch.object(shards, 'create', wraps=shards.create) as create,
  ):
    found = run(name, strategy)
  assert create.called != (name in _UNSHARDED), create.call_count
  return found


def run_checked(name, strategy):
  """Returns a program's results, and checks that our strategy did the work.

  Raises:
    AssertionError: if copies of a variable differ, if variables are on the wrong
      device, if optimizer state is not sharded where it should be, or if fewer
      reductions than steps crossed replicas.
  """
  is_on_servers = isinstance(strategy, tfs.ParameterServerStrategy)
  before = {} if is_on_servers else strategy.communication_report()['calls']
  is_divided = getattr(strategy.extended, 'state_shards', None) is not None
  found = (_run_sharded if is_divided else run)(name, strategy)
  models = list({id(m): m for m in common.trained}.values())
  for model in models:
    _check_variables(strategy, [*model.variables, *model.optimizer.variables])
  # In an eager step each replica gets the whole batch.
  steps = sum(
    int(m.optimizer.iterations.numpy()) for m in models if not m.run_eagerly
  )
  if is_on_servers:
    report = strategy.report()
    # A loaded model has counted the steps of the saved one.
    assert report['steps'] >= steps or name == 'saved_and_loaded', report
    assert not models or sum(report['bytes_per_server']), report
    if shares_batches(strategy) and name in own_steps.ARE_SHARED:
      # Workers that share a batch use extra slots for their sums.
      assert shares_rows(strategy) == own_steps.ARE_SHARED[name], name
  elif strategy.num_replicas_in_sync > 1:
    after = strategy.communication_report()['calls']
    calls = sum(after.values()) - sum(before.values())
    assert calls >= steps, f'{calls} reductions in {steps} steps'
  return found


def _check_variables(strategy, variables):
  if isinstance(strategy, tfs.ParameterServerStrategy):
    for variable in variables:
      for part in getattr(variable.value, 'parts', [variable.value]):
        assert part.device.startswith('/job:ps/'), variable.path
    return
  for variable in variables:
    value = variable.value
    copies = getattr(value, 'values', ())
    is_divided = any(copy.shape != variable.shape for copy in copies)
    if is_divided or value.synchronization == _ON_READ:
      continue
    if isinstance(strategy, tfs.CentralStorageStrategy):
      if 'seed_generator_state' not in variable.path:
        [copy] = copies
        assert copy.device == strategy.parameter_device, variable.path
      continue
    # A GPU adds up in the order of arrival, also in the update of each copy.
    tolerance = 0 if virtual_devices.IS_DETERMINISTIC else 1e-6
    for copy in copies[1:]:
      np.testing.assert_allclose(
        copies[0], copy, tolerance, tolerance, err_msg=variable.path
      )


def limit_of(name) -> float:
  """Returns the allowed difference from one device, relative to numbers above 1."""
  # 16-bit sums depend on their order.
  return 2e-3 if name.startswith('mixed_') else 1e-6


def difference(one, other) -> float:
  """Returns the largest |one - other| / max(1, |one|) in two structures of numbers.

  Lists count as tuples, because some strategies return lists when they gather.
  """
  one, other = tf.nest.flatten(one), tf.nest.flatten(other)
  if len(one) != len(other):
    return float('inf')
  found = 0.0
  for want, got in zip(one, other, strict=True):
    want, got = np.asarray(want), np.asarray(got)
    if want.shape != got.shape:
      return float('inf')
    if want.dtype.kind not in 'biuf':
      found = found if (want == got).all() else float('inf')
      continue
    want, got = want.astype(np.float64), got.astype(np.float64)
    part = np.abs(want - got) / np.maximum(1, np.abs(want))
    # A NaN in only one of them must not pass as a small difference.
    part = np.where(np.isnan(want) & np.isnan(got), 0, part)
    found = max(found, np.nan_to_num(part, nan=np.inf).max(initial=0.0))
  return float(found)


@dataclasses.dataclass(frozen=True)
class Failure:
  """The error that a program raised: its type, and its text with a traceback."""

  type: str
  text: str
  is_typed: bool


def _outcome(name, strategy, is_checked):
  """Returns a program's results, or a `Failure`."""
  try:
    return run_checked(name, strategy) if is_checked else run(name, strategy)
  except Exception as e:
    return Failure(
      type(e).__name__,
      f'{e}\n\n{traceback.format_exc()}',
      isinstance(e, tfs.errors.Error),
    )


def work(rank, rows, directory):
  """Runs rows, each a case and a program, in one process of their cases.

  Writes the results of each row. A worker stops at the first row that raises,
  because other workers may be waiting in it. All rows of a case use the same
  strategy object, so each also tests that earlier rows left it usable.
  """
  virtual_devices.configure()
  common.directory = directory
  strategy, before = None, None
  for case, name in rows:
    case = CASES[case] if case else None
    if case is not before or (case and case.servers):
      _close(strategy)
      strategy, before = case and case.create(), case
    rank = getattr(strategy, 'rank', rank)
    found = _outcome(name, strategy, case and not case.is_stock)
    _write(directory, rank, case, name, found)
    if isinstance(found, Failure) and case and not case.servers:
      break
  _close(strategy)


def _close(strategy):
  if hasattr(strategy, 'close'):
    strategy.close()


def _path(directory, rank, case, name):
  return os.path.join(directory, f'{rank}.{case and case.name}.{name}')


def _write(directory, rank, case, name, found):
  path = _path(directory, rank, case, name)
  with open(f'{path}.part', 'wb') as f:
    pickle.dump(found, f)
  os.replace(f'{path}.part', path)


def start(rows, directory, deadline) -> list[processes.Outcome]:
  """Runs rows in the processes of their cases, which share one layout.

  Args:
    rows: pairs of a case's name, or None for one device, and a program's name.
    directory: directory that `work` writes to.
    deadline: time limit in seconds.

  Returns:
    The outcome of each process.
  """
  case = CASES.get(rows[0][0])
  args = rows, directory
  if case is not None and case.link == 'mpi':
    request = os.path.join(directory, 'request')
    with open(request, 'wb') as f:
      pickle.dump(args, f)
    command = [mpiexec(), '-n', str(case.workers), sys.executable]
    command += ['-m', 'tests.programs.runner', request]
    commands.run(command, deadline_seconds=deadline)
    return []
  if case is not None and case.servers:
    with parameter_servers.Job(case.workers, case.servers, deadline) as job:
      job.start_chief(work, (0, *args))
      return [job.wait()]
  if case is not None and case.workers:
    are_unlike = case.are_unlike or processes.ARE_UNLIKE
    with processes.Workers(
      work, case.workers, args, deadline=deadline, are_unlike=are_unlike
    ) as workers:
      return workers.wait()
  with processes.ProcessGroup(deadline) as group:
    group.start_function(0, work, (0, *args))
    return group.wait_for([0])


def mpiexec() -> str | None:
  """Returns the path of `mpiexec`, or None. Prefers the one beside this
  interpreter.
  """
  if importlib.util.find_spec('mpi4py') is None:
    return None
  beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
  return beside if os.path.exists(beside) else shutil.which('mpiexec')


def read(directory, case, name) -> list:
  """Returns each rank's results of a program, or None for a rank without results."""
  case = CASES.get(case)
  count = 1 if case is None or case.servers else max(1, case.workers)
  found = []
  for rank in range(count):
    path = _path(directory, rank, case, name)
    if os.path.exists(path):
      with open(path, 'rb') as f:
        found.append(pickle.load(f))
    else:
      found.append(None)
  return found


if __name__ == '__main__':
  with open(sys.argv[1], 'rb') as request:
    work(0, *pickle.load(request))
