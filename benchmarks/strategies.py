"""What each strategy costs on MNIST, and how far it scales.

  python -m benchmarks.strategies --data_path=mnist.npz
  python -m benchmarks.strategies --data_path=mnist.npz --plot=scaling.png
  python -m benchmarks.strategies --tables=costs --strategies=ring_mirrored

Two tables. The first has a row a strategy: speed, traffic, memory, accuracy.
The second has a row a cluster, from one worker to four: speed and time to a
test loss, which --plot draws. Without --data_path they are of the digits that
scikit-learn carries, which are too few to compare speeds.

All rows train the model of the examples with their optimizer, the same seed and
the same global batch. Each run is a process, or a job of the launcher, of its
own. Before the clock starts it trains some steps, which trace, and takes them
back; validation is not timed either. Rounds repeat all rows in another order.

'MB a step': between devices of a process, what the strategy counted, into the
busiest device and into all of them (TensorFlow's own all-reduce counts nothing);
between processes, all that went over loopback while steps ran, so nothing else
should use it meanwhile. 'variables MB': of model, optimizer and metrics, on the
device that has most and on all of them. 'peak RSS': of the largest task, with
TensorFlow and the data.

In the second table the clock also pauses while the test loss is computed, every
--evaluate_every steps; the steps that are on the way end first. A cluster of
more tasks than cores shares the cores.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# TensorFlow reads it when it is imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import measure, processes, report
from benchmarks.strategy_costs import catalogue, plot, results, running
from tf_strategies import errors

_COSTS, _SCALING = 'costs', 'scaling'

_TABLES = flags.DEFINE_list(
  'tables', [_COSTS, _SCALING], 'Which of costs,scaling.'
)
_STRATEGIES = flags.DEFINE_list(
  'strategies',
  [job.name for job in catalogue.COSTS],
  'Rows of the first table.',
)
_CONFIGURATIONS = flags.DEFINE_list(
  'configurations',
  list(catalogue.CONFIGURATIONS),
  'Rows of the second table: ring_<workers>, async_<workers>w<servers>ps or '
  'sync_<workers>w<servers>ps.',
)
_DATA_PATH = flags.DEFINE_string(
  'data_path', None, 'MNIST, as the examples take it; without it, digits.'
)
_NUM_VIRTUAL_DEVICES = flags.DEFINE_integer(
  'num_virtual_devices',
  4,
  'Logical devices of a strategy in one process.',
  lower_bound=1,
)
_BATCH = flags.DEFINE_integer(
  'global_batch_size', 64, 'Rows of a step.', lower_bound=1
)
_EPOCHS = flags.DEFINE_integer('epochs', 3, 'Of each run.', lower_bound=1)
_STEPS_PER_EPOCH = flags.DEFINE_integer(
  'steps_per_epoch',
  None,
  'Steps of an epoch, more or fewer than the data make.',
  lower_bound=1,
)
_MODEL = flags.DEFINE_enum('model', 'cnn', ('cnn', 'mlp'), 'Of the examples.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of each run.', lower_bound=0)
_ROUNDS = flags.DEFINE_integer('rounds', 1, 'Runs of each row.', lower_bound=1)
_TARGET_LOSS = flags.DEFINE_float(
  'target_loss', 0.1, 'The test loss to reach.', lower_bound=0.0
)
_EVALUATE_EVERY = flags.DEFINE_integer(
  'evaluate_every',
  None,
  'Steps between two test losses. Default: 100; 5 with the digits.',
  lower_bound=1,
)
_DEADLINE_SECONDS = flags.DEFINE_float(
  'deadline_seconds', 300.0, 'How long a run may take.', lower_bound=1.0
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'Where to write the results as JSON.'
)
_PLOT = flags.DEFINE_string(
  'plot', None, 'Where to draw the second table, as PNG.'
)

# For each worker: one traces, a second finds the function built.
_UNTIMED_STEPS = 2


def run_jobs(
  title: str,
  jobs: Sequence[catalogue.Job],
  evaluate_every: int,
) -> list[results.Rows]:
  """Runs all jobs in turns; what was found, in the order of the jobs.

  A job that fails is not run again.

  Args:
    title: for lines of progress.
    jobs: one a row.
    evaluate_every: steps between two test losses; 0 for none.
  """
  by_name = {job.name: job for job in jobs}
  found = {name: [] for name in by_name}
  failed = dict.fromkeys(by_name, '')
  for number, order in enumerate(measure.turns(by_name, _ROUNDS.value), 1):
    for name in order:
      if failed[name]:
        continue
      what = f'{title}, round {number} of {_ROUNDS.value}: {name}'
      _progress(f'{what} begins')
      began = time.monotonic()
      try:
        found[name].append(_run(by_name[name], evaluate_every))
        verb = 'ends'
      except (errors.Error, RuntimeError) as e:
        failed[name] = str(e)
        _progress(str(e))
        verb = 'failed'
      _progress(f'{what} {verb} after {time.monotonic() - began:.1f} s')
  return [
    results.Rows(job, found[name], failed[name])
    for name, job in by_name.items()
  ]


def _run(job: catalogue.Job, evaluate_every: int) -> dict[str, Any]:
  in_process = not job.num_workers
  spec = {
    'options': _options(job),
    'num_virtual_devices': _NUM_VIRTUAL_DEVICES.value if in_process else 0,
    'untimed_steps': _UNTIMED_STEPS * max(1, job.num_workers),
    'evaluate_every': evaluate_every,
  }
  return results.measured(job, running.run(job, spec, _DEADLINE_SECONDS.value))


def _options(job: catalogue.Job) -> dict[str, Any]:
  """Fields of the example's options."""
  path = _DATA_PATH.value
  return {
    'strategy': job.strategy,
    'dataset': 'mnist' if path else 'digits',
    # Jobs run in the directory of this project.
    'data_path': os.path.abspath(path) if path else None,
    'model': _MODEL.value,
    'global_batch_size': _BATCH.value,
    'epochs': _EPOCHS.value,
    'steps_per_epoch': _STEPS_PER_EPOCH.value,
    'seed': _SEED.value,
    'verbose': False,
    **job.options,
  }


def _caption() -> str:
  """What holds for all rows of a table."""
  words = (
    f'{"MNIST" if _DATA_PATH.value else "Digits, not MNIST (no --data_path)"}, '
    f'{_MODEL.value}, global batch {_BATCH.value}, '
    f'epochs: {_EPOCHS.value}, {os.cpu_count()} cores'
  )
  if not _DATA_PATH.value:
    words += '; too few images to compare speeds'
  return words


def _sharing(jobs: Sequence[catalogue.Job]) -> str:
  """Says that tasks share cores; empty if each has its own."""
  cores = os.cpu_count() or 1
  most = max((job.num_tasks for job in jobs), default=0)
  if most <= cores:
    return ''
  return f'up to {most} tasks share the {cores} cores'


def _print_table(head: str, table: str, rows: Sequence[results.Rows]) -> None:
  print(f'\n{head}\n\n{table}', flush=True)
  for row in rows:
    if row.error:
      print(f'\nfailed: {row.error.splitlines()[0]}', flush=True)


def _measure_costs() -> list[results.Rows]:
  jobs = [catalogue.costs(name) for name in _STRATEGIES.value]
  rows = run_jobs(_COSTS, jobs, evaluate_every=0)
  table = results.cost_table(rows, _NUM_VIRTUAL_DEVICES.value)
  _print_table(_caption(), table, rows)
  return rows


def _measure_scaling() -> list[results.Rows]:
  jobs = [catalogue.configuration(name) for name in _CONFIGURATIONS.value]
  every = _EVALUATE_EVERY.value or (100 if _DATA_PATH.value else 5)
  rows = run_jobs(_SCALING, jobs, every)
  sharing = _sharing(jobs)
  head = _caption() + (f'; {sharing}' if sharing else '')
  table = results.scaling_table(rows, _TARGET_LOSS.value, _EPOCHS.value)
  _print_table(head, table, rows)
  if _PLOT.value:
    plot.write(_PLOT.value, rows, _TARGET_LOSS.value, head.replace('; ', '\n'))
  return rows


_MEASURE: dict[str, Callable[[], list[results.Rows]]] = {
  _COSTS: _measure_costs,
  _SCALING: _measure_scaling,
}


def _check_flags() -> None:
  """Refuses what would fail after minutes.

  Raises:
    UnsupportedOptionError: a table, row, picture or report that cannot be.
    DataError: data that cannot be read.
  """
  for name in _TABLES.value:
    if name not in _MEASURE:
      raise errors.UnsupportedOptionError(
        f'tables={name!r}', f'one or both of {",".join(_MEASURE)}', 'drop it'
      )
  for name in _STRATEGIES.value:
    catalogue.costs(name)
  for name in _CONFIGURATIONS.value:
    catalogue.configuration(name)
  report.check_target('report_json', _REPORT_JSON.value)
  if _PLOT.value:
    plot.check_installed(_PLOT.value)
  if _DATA_PATH.value and not os.path.exists(_DATA_PATH.value):
    raise errors.DataError(
      f'data_path={_DATA_PATH.value!r} does not exist; expected MNIST as an '
      '.npz file or a directory. Leave it out to use the digits.'
    )


def _settings() -> dict[str, Any]:
  chosen = (
    *(_TABLES, _NUM_VIRTUAL_DEVICES, _MODEL, _BATCH, _EPOCHS),
    *(_STEPS_PER_EPOCH, _SEED, _ROUNDS, _TARGET_LOSS, _EVALUATE_EVERY),
  )
  dataset = 'mnist' if _DATA_PATH.value else 'digits'
  return {'dataset': dataset, **{flag.name: flag.value for flag in chosen}}


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
  """Runs the benchmark that the flags describe; returns the exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  try:
    _check_flags()
  except errors.Error as e:
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return 1
  content = {
    'benchmark': 'strategies',
    **report.environment(),
    'settings': _settings(),
  }
  is_well = True
  with processes.ended_by_signals():
    for table in _TABLES.value:
      rows = _MEASURE[table]()
      is_well = is_well and not any(row.error for row in rows)
      content[table] = [row.record(_TARGET_LOSS.value) for row in rows]
      if _REPORT_JSON.value:
        report.write_json(_REPORT_JSON.value, content)
  return 0 if is_well else 1


if __name__ == '__main__':
  app.run(main)
