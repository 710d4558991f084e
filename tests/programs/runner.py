"""Runs programs on one device and under strategies, and compares what they give.

Programs use what stands in their scope; those with a loop of their own ask
`tf.distribute.get_strategy()`, as one device's program may.

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

_ON_READ = tf.VariableSynchronization.ON_READ
# Those in docs/programs.md.
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
  **own_steps.ON_SERVERS,
  **recommender.PROGRAMS,
  **recommender.MUTATED,
}


def run(name, strategy=None):
  """Returns what a program gives, under a strategy or on one device."""
  return common.run(PROGRAMS[name], strategy)


@functools.cache
def one_device(name):
  """Returns what a program gives on one device."""
  return run(name)


def run_checked(name, strategy):
  """Returns the same under a strategy of ours, which must have done the work.

  Raises:
    AssertionError: copies of a variable differ, variables are not where the strategy
      puts them, or fewer reductions than steps crossed replicas.
  """
  is_on_servers = isinstance(strategy, tfs.ParameterServerStrategy)
  before = {} if is_on_servers else strategy.communication_report()['calls']
  found = run(name, strategy)
  models = list({id(m): m for m in common.trained}.values())
  for model in models:
    _check_variables(strategy, [*model.variables, *model.optimizer.variables])
  # In an eager step each replica has the whole batch.
  steps = sum(
    int(m.optimizer.iterations.numpy()) for m in models if not m.run_eagerly
  )
  if is_on_servers:
    report = strategy.report()
    assert report['steps'] >= steps, report
    assert not models or sum(report['bytes_per_server']), report
    if strategy.shares_batches and name in own_steps.ARE_SHARED:
      # Workers that share a batch leave slots for their sums.
      is_shared = bool(strategy.engine._free_slots)
      assert is_shared == own_steps.ARE_SHARED[name], name
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
    for copy in copies[1:]:
      np.testing.assert_array_equal(copies[0], copy, variable.path)


def limit_of(name) -> float:
  """Returns how far a number may be from one device's, as a fraction above 1."""
  # Sums of 16 bits depend on their order.
  return 2e-3 if name.startswith('mixed_') else 1e-6


def difference(one, other) -> float:
  """Returns the largest |one - other| / max(1, |one|) in two structures of numbers.

  Lists count as tuples: a strategy that gathers values gives those.
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
    # A number that only one of them has (nan) is no small difference.
    part = np.where(np.isnan(want) & np.isnan(got), 0, part)
    found = max(found, np.nan_to_num(part, nan=np.inf).max(initial=0.0))
  return float(found)


@dataclasses.dataclass(frozen=True)
class Failure:
  """What a program raised: its type, and text with a traceback."""

  type: str
  text: str
  is_typed: bool


def _outcome(name, strategy, is_checked):
  """Returns what a program gives, or a `Failure`."""
  try:
    return run_checked(name, strategy) if is_checked else run(name, strategy)
  except Exception as e:
    return Failure(
      type(e).__name__,
      f'{e}\n\n{traceback.format_exc()}',
      isinstance(e, tfs.errors.Error),
    )


def work(rank, rows, directory):
  """Runs rows, of a case and a program each, in one process of their cases.

  Writes what each gives. A worker ends with the first that raises: other workers may
  wait in it. Workers do all rows of a case under one strategy, so that each finds
  what the ones before have left.
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
  """Runs rows in the processes of their cases, which have one layout.

  Args:
    rows: names of a case, or None for one device, and of a program.
    directory: where `work` writes.
    deadline: in seconds.

  Returns:
    How each process ended.
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
  """Returns the launcher beside this interpreter, or on the path, if there is one."""
  if importlib.util.find_spec('mpi4py') is None:
    return None
  beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
  return beside if os.path.exists(beside) else shutil.which('mpiexec')


def read(directory, case, name) -> list:
  """Returns what each rank of a case wrote of a program; None if it wrote nothing."""
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
