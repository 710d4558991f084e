"""The conformance table for strategies whose replicas are on several workers.

Workers are processes. Each runs the same features one after the other, every
one under a new strategy, and sends home what came out of it; the test compares
each worker's results with one device's, and the workers with each other.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from typing import Any

import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from benchmarks import processes as commands
from tests import processes, virtual_devices
from tests.conformance import harness

MODULES = (
  'tests.conformance.fit_test',
  'tests.conformance.optimizer_options_test',
)


@dataclasses.dataclass(frozen=True)
class WorkerCase:
  """A row of the table: a strategy on so many workers.

  Attributes:
    name: of the case.
    strategy: as `create_strategy` knows it.
    workers: how many processes.
    devices: logical CPUs of each.
    link: 'tcp', or 'mpi' for workers that mpiexec starts.
    are_unlike: see `processes.Workers`. All features then use one strategy, so that
      each finds what the ones before have left.
  """

  name: str
  strategy: str
  workers: int
  devices: int
  link: str = 'tcp'
  are_unlike: bool = False


@dataclasses.dataclass
class WorkerResult:
  """What one worker has to say of one feature; `error` if it failed."""

  weights: list[np.ndarray] = dataclasses.field(default_factory=list)
  optimizer_state: dict[str, np.ndarray] = dataclasses.field(
    default_factory=dict
  )
  history: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
  predictions: Any = None
  steps: int = 0
  report: dict[str, Any] = dataclasses.field(default_factory=dict)
  error: str = ''


def features() -> dict[str, harness.Feature]:
  """Every feature of the table by name."""
  found = {}
  for module in MODULES:
    for feature in importlib.import_module(module).FEATURES:
      found[feature.name] = feature
  return found


def run(case: WorkerCase, names, deadline: float) -> list[dict]:
  """For each worker, what came out of each feature."""
  if case.link == 'mpi':
    return _run_under_mpiexec(case, names, deadline)
  return processes.run_workers(
    _train_all,
    case.workers,
    args=(case, tuple(names)),
    deadline=deadline,
    are_unlike=case.are_unlike or processes.ARE_UNLIKE,
  )


def mpiexec() -> str | None:
  """The launcher beside this interpreter (the mpich wheel's) or on the path."""
  if importlib.util.find_spec('mpi4py') is None:
    return None
  beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
  return beside if os.path.exists(beside) else shutil.which('mpiexec')


def _run_under_mpiexec(case, names, deadline):
  with tempfile.TemporaryDirectory() as directory:
    request = os.path.join(directory, 'request')
    with open(request, 'wb') as f:
      pickle.dump((case, tuple(names)), f)
    command = [mpiexec(), '-n', str(case.workers), sys.executable]
    command += ['-m', 'tests.conformance.mpi_worker', request]
    commands.run(command, deadline_seconds=deadline, is_checked=True)
    results = []
    for rank in range(case.workers):
      with open(f'{request}.{rank}', 'rb') as f:
        results.append(pickle.load(f))
    return results


def serve_request(path: str) -> None:
  """What a worker that mpiexec started does: trains, and writes a file."""
  with open(path, 'rb') as f:
    case, names = pickle.load(f)
  results = _train_all(None, case, names)
  rank = next(iter(results.values())).report['rank']
  with open(f'{path}.{rank}', 'wb') as f:
    pickle.dump(results, f)


def _train_all(rank, case, names):
  del rank
  if case.are_unlike:
    return _train(case, names)
  return {name: _train(case, [name])[name] for name in names}


def create(case: WorkerCase) -> tf.distribute.Strategy:
  """The strategy of a case, in one of its worker processes."""
  # The first of two is not the device on which host calls run.
  options = {'devices': virtual_devices.names(case.devices)[::-1]}
  if case.link != 'tcp':
    options['options'] = tfs.RingOptions(link=case.link)
  is_collective = case.strategy == 'multi_worker_collective'
  if is_collective and virtual_devices.KIND == 'GPU' and case.workers > 1:
    # NCCL takes no two workers on one GPU; with one worker it is run.
    options['options'] = tfs.CollectiveOptions(communication='ring')
  return tfs.create_strategy(case.strategy, **options)


def _train(case, names):
  """What comes out of each feature, all under one strategy."""
  table = features()
  with contextlib.closing(create(case)) as strategy:
    return {name: _result(strategy, case, table[name]) for name in names}


def _result(strategy, case, feature):
  before = strategy.communication_report()['calls']
  try:
    result = harness.train(feature, strategy)
    harness.ConformanceTest().assert_replicas_equal(result.model, case.devices)
    return WorkerResult(
      result.weights,
      result.optimizer_state,
      result.history,
      result.evaluation,
      result.predictions,
      int(result.model.optimizer.iterations.numpy()),
      _report_since(before, strategy),
    )
  except Exception:
    return WorkerResult(
      report=_report_since(before, strategy), error=traceback.format_exc()
    )


def _report_since(before, strategy):
  """The report, with the calls since `before`."""
  report = strategy.communication_report()
  counts = {k: n - before.get(k, 0) for k, n in report['calls'].items()}
  return {**report, 'calls': {k: n for k, n in counts.items() if n}}


@functools.cache
def expected(name: str) -> harness.Result:
  """What one device makes of a feature."""
  return harness.train(features()[name])


class MultiWorkerConformanceTest(harness.ConformanceTest):
  """Compares what workers sent home."""

  def assert_workers(self, name: str, results: list[WorkerResult]):
    """All workers equal each other bitwise, and one device as promised."""
    feature = features()[name]
    for result in results:
      if result.error:
        raise AssertionError(result.error)
    for result in results[1:]:
      self.assert_equal(results[0], result)
    for result in results:
      self.assert_results(expected(name), result, feature.tolerance)
      self.assert_communication(result)

  def assert_equal(self, first, other):
    """Not one bit differs between two workers."""
    for a, b in zip(first.weights, other.weights, strict=True):
      np.testing.assert_array_equal(a, b)
    for key, value in first.optimizer_state.items():
      np.testing.assert_array_equal(value, other.optimizer_state[key], key)
    np.testing.assert_array_equal(first.predictions, other.predictions)
    self.assertEqual(first.history, other.history)
    self.assertEqual(first.evaluation, other.evaluation)

  def assert_communication(self, result):
    """Gradients crossed workers in every step."""
    self.assertGreater(result.steps, 0)
    calls = result.report['calls']
    self.assertGreaterEqual(
      calls.get('all_reduce', 0) + calls.get('all_gather', 0), result.steps
    )
