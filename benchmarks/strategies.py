"""Measures speed, traffic, memory and accuracy of each strategy on MNIST.

  python -m benchmarks.strategies --data_path=mnist.npz
  python -m benchmarks.strategies --strategies=ring_mirrored

Without --data_path the data are the digits of scikit-learn, which are too few to
compare speeds.

All rows train the model of the examples with their optimizer, the same seed and
the same global batch. Each run is its own process, or its own job of the launcher.
Before the clock starts, it trains some steps for tracing and undoes them.
Validation is not timed. Rounds repeat all rows in another order.

'MB a step' has the bytes into the busiest device and into all devices. For the
devices of one process, the strategy counts them (TensorFlow's all-reduce does not).
Between processes, it is all traffic over loopback during the steps, so no other
program should use loopback meanwhile. 'Variables MB' is the size of the variables
of model, optimizer and metrics on the device with most, and on all devices.
"""

import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

# TensorFlow reads it during import.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import measure, processes, report
from benchmarks.strategy_costs import catalogue, results
from tf_strategies import errors

_STRATEGIES = flags.DEFINE_list(
  'strategies',
  [job.name for job in catalogue.COSTS],
  'Rows of the table.',
)
_DATA_PATH = flags.DEFINE_string(
  'data_path', None, 'MNIST, as in the examples. Default: digits.'
)
_NUM_VIRTUAL_DEVICES = flags.DEFINE_integer(
  'num_virtual_devices',
  4,
  'Logical devices of each strategy in one process.',
  lower_bound=1,
)
_BATCH = flags.DEFINE_integer(
  'global_batch_size', 64, 'Rows per step.', lower_bound=1
)
_EPOCHS = flags.DEFINE_integer('epochs', 3, 'Epochs per run.', lower_bound=1)
_STEPS_PER_EPOCH = flags.DEFINE_integer(
  'steps_per_epoch',
  None,
  'Steps per epoch. Default: all data.',
  lower_bound=1,
)
_MODEL = flags.DEFINE_enum(
  'model', 'cnn', ('cnn', 'mlp'), 'Model of the examples.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of each run.', lower_bound=0)
_ROUNDS = flags.DEFINE_integer('rounds', 1, 'Runs per row.', lower_bound=1)
_DEADLINE_SECONDS = flags.DEFINE_float(
  'deadline_seconds', 300.0, 'Maximum duration of a run.', lower_bound=1.0
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)
# Per worker: the first step traces, the second uses the traced function.
_UNTIMED_STEPS = 2
_ROOT = pathlib.Path(__file__).resolve().parent.parent
_TASK = 'benchmarks.strategy_costs.task'


def run_jobs(jobs: Sequence[catalogue.Job]) -> list[dict[str, Any]]:
  """Runs all jobs in turns, and returns the records in the order of the jobs.

  A job that fails is not run again.

  Args:
    jobs: one job per row.
  """
  by_name = {job.name: job for job in jobs}
  found = {name: [] for name in by_name}
  failed = dict.fromkeys(by_name, '')
  for number, order in enumerate(measure.turns(by_name, _ROUNDS.value), 1):
    for name in order:
      if failed[name]:
        continue
      what = f'round {number} of {_ROUNDS.value}: {name}'
      _progress(f'{what} begins')
      began = time.monotonic()
      try:
        found[name].append(_run(by_name[name]))
        verb = 'ends'
      except (errors.Error, RuntimeError) as e:
        failed[name] = str(e)
        verb = 'failed'
      _progress(f'{what} {verb} after {time.monotonic() - began:.1f} s')
  return [
    results.record(job, found[name], failed[name])
    for name, job in by_name.items()
  ]


def _run(job: catalogue.Job) -> dict[str, Any]:
  """Runs a job: one process, or the launcher and its tasks.

  Raises:
    WorkerUnavailableError: if it failed, or did not end in time. Shows the end of its
      output.
  """
  in_process = not job.num_workers
  with tempfile.TemporaryDirectory() as directory:
    spec = {
      'options': _options(job),
      'num_virtual_devices': _NUM_VIRTUAL_DEVICES.value if in_process else 0,
      'untimed_steps': _UNTIMED_STEPS * max(1, job.num_workers),
      'output_dir': directory,
    }
    words = [sys.executable, '-m', _TASK, json.dumps(spec)]
    if job.launcher_flags:
      launch = [sys.executable, '-m', 'tf_strategies.launch']
      words = [*launch, *job.launcher_flags, '--', *words]
    with processes.Command(
      words,
      name=job.name,
      cwd=_ROOT,
      deadline_seconds=_DEADLINE_SECONDS.value,
      # Only this process receives Ctrl-C. It then ends the job.
      start_new_session=True,
    ) as command:
      if status := command.wait():
        command.fail(f'ended with status {status}')
    reports = [
      json.loads(path.read_text(encoding='utf-8'))
      for path in sorted(pathlib.Path(directory).glob('*.json'))
    ]
  return results.measured(job, reports)


def _options(job: catalogue.Job) -> dict[str, Any]:
  """Returns the options of the example by name."""
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
  """Returns the facts that hold for all rows of a table."""
  words = (
    f'{"MNIST" if _DATA_PATH.value else "Digits, not MNIST (no --data_path)"}, '
    f'{_MODEL.value}, global batch {_BATCH.value}, '
    f'epochs: {_EPOCHS.value}, {os.cpu_count()} cores'
  )
  if not _DATA_PATH.value:
    words += '; too few images to compare speeds'
  return words


def _check_flags() -> None:
  """Checks the flags before the runs.

  Raises:
    UnsupportedOptionError: if a row is unknown, or the report cannot be written.
    DataError: if the data do not exist.
  """
  for name in _STRATEGIES.value:
    catalogue.costs(name)
  report.check_target('report_json', _REPORT_JSON.value)
  if _DATA_PATH.value and not os.path.exists(_DATA_PATH.value):
    raise errors.DataError(
      f'data_path={_DATA_PATH.value!r} does not exist; expected MNIST as an '
      '.npz file or a directory. Leave it out to use the digits.'
    )


def _settings() -> dict[str, Any]:
  chosen = (
    *(_NUM_VIRTUAL_DEVICES, _MODEL, _BATCH, _EPOCHS),
    *(_STEPS_PER_EPOCH, _SEED, _ROUNDS),
  )
  dataset = 'mnist' if _DATA_PATH.value else 'digits'
  return {'dataset': dataset, **{flag.name: flag.value for flag in chosen}}


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
  """Runs the benchmark, and returns the exit status."""
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
  with processes.ended_by_signals():
    records = run_jobs([catalogue.costs(name) for name in _STRATEGIES.value])
  table = results.table(records, _NUM_VIRTUAL_DEVICES.value)
  print(f'\n{_caption()}\n\n{table}', flush=True)
  failures = [record['error'] for record in records if record['error']]
  for failure in failures:
    print(f'\nfailed: {failure}', flush=True)
  if _REPORT_JSON.value:
    report.write_json(_REPORT_JSON.value, content | {'costs': records})
  return 1 if failures else 0


if __name__ == '__main__':
  app.run(main)
