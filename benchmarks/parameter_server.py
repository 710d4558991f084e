"""Training with parameter servers: ours and TensorFlow's strategy.

  python -m benchmarks.parameter_server
  python -m benchmarks.parameter_server --models=cnn --num_workers=2 --rounds=2

'stock' is tf.distribute.ParameterServerStrategy with a custom loop, as in its
tutorial: a data set on each worker, a Keras optimizer, and a closure per step.
'ours' is Keras's `fit` under tfs.ParameterServerStrategy on data that the workers
read. 'ours_fed' sends batches from the coordinator. All train the same model from the
same weights on the same data, with Adam (SGD with momentum for 25 MB). `fit` also
computes the mean loss, which 'stock' does not.

Each peer has its own cluster of processes, on this machine. The clusters run during
the whole benchmark and take turns. A turn begins with a block of warm-up steps. No
step is in progress when a block begins or ends. The time between blocks (the ends of
epochs) is not measured. After each turn the optimizer's count of steps must be exact.
Only 'stock' may miss steps that workers count at the same time ('steps counted').
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

# TensorFlow reads it during import.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import measure, processes, report, worker_pool
from benchmarks.parameter_server_peers import catalogue, jobs, results

_MODELS = flags.DEFINE_list(
  'models',
  None,
  f'Any of {",".join(catalogue.MODELS)}. Default: all.',
)
_PEERS = flags.DEFINE_list(
  'peers',
  None,
  f'Any of {",".join(p.name for p in catalogue.PEERS)}. Default: all.',
)
_NUM_WORKERS = flags.DEFINE_list('num_workers', '1,2,4', 'Numbers of workers.')
_NUM_PS = flags.DEFINE_integer('num_ps', 2, 'Parameter servers.', lower_bound=1)
_STEPS_PER_EXECUTION = flags.DEFINE_list(
  'steps_per_execution', '1,10', 'Steps per call.'
)
_BATCH = flags.DEFINE_integer(
  'per_replica_batch_size', 64, 'Rows per worker.', lower_bound=1
)
_STEPS = flags.DEFINE_integer(
  'steps', 300, 'Steps per block, of all workers together.', lower_bound=1
)
_BLOCKS = flags.DEFINE_integer(
  'blocks',
  2,
  'Measured blocks per turn, after one warm-up block.',
  lower_bound=1,
)
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns per peer.', lower_bound=1)
_DEADLINE_SECONDS = flags.DEFINE_float(
  'deadline_seconds',
  worker_pool.DEADLINE_SECONDS,
  'Maximum duration of a turn.',
  lower_bound=1.0,
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)


def run_case(
  running: Sequence[jobs.Job], model: str, num_workers: int, per_call: int
) -> dict[str, Any]:
  """Measures all peers on one model, in turns, and returns the records."""
  by_name = {job.peer.name: job for job in running}
  built = {
    name: job.ask(
      'set_up',
      model=model,
      steps_per_execution=per_call,
      batch_rows=_BATCH.value,
    )
    for name, job in by_name.items()
  }
  results.check_initial_losses({n: b['loss'] for n, b in built.items()})
  turns = {name: [] for name in by_name}
  for order in measure.turns(by_name, _ROUNDS.value):
    for name in order:
      turn = by_name[name].ask('run', blocks=_BLOCKS.value, steps=_STEPS.value)
      results.check_turn(
        name, turn, (1 + _BLOCKS.value) * _STEPS.value, built[name]['loss']
      )
      turns[name].append(turn)
  for job in running:
    job.ask('release')
  records = [
    results.record(name, found, _STEPS.value, _BATCH.value)
    for name, found in turns.items()
  ]
  results.add_ratios(records)
  return {
    'model': model,
    'num_workers': num_workers,
    'steps_per_execution': per_call,
    **next(iter(built.values())),
    'peers': records,
  }


def run_num_workers(
  num_workers: int,
  peers: Sequence[catalogue.Peer],
  models: Sequence[str],
  steps_per_execution: Sequence[int],
) -> list[dict[str, Any]]:
  """Measures all peers with one number of workers, and returns the cases."""
  with contextlib.ExitStack() as stack:
    running = _start(stack, peers, num_workers)
    cases = []
    for model in models:
      for per_call in steps_per_execution:
        _progress(f'{num_workers} workers: {model}, {per_call} steps a call')
        cases.append(run_case(running, model, num_workers, per_call))
    return cases


def _start(
  stack: contextlib.ExitStack, peers: Sequence[catalogue.Peer], num_workers: int
) -> list[jobs.Job]:
  _progress(f'{num_workers} workers: starting {len(peers)} clusters')
  size = jobs.Size(num_workers, _NUM_PS.value)
  return [
    stack.enter_context(jobs.Job(peer, size, _DEADLINE_SECONDS.value))
    for peer in peers
  ]


def _integers(flag) -> list[int]:
  texts = flag.value
  if not all(text.isdecimal() and int(text) >= 1 for text in texts):
    raise app.UsageError(
      f'--{flag.name}={",".join(texts)}: write integers of 1 or more, with '
      'commas between them.'
    )
  return [int(text) for text in texts]


def _chosen(flag, allowed: Sequence[str]) -> list[str]:
  names = flag.value or allowed
  unknown = sorted(set(names) - set(allowed))
  if unknown:
    raise app.UsageError(
      f'--{flag.name}: {unknown[0]!r} is none of {", ".join(allowed)}.'
    )
  return [name for name in allowed if name in names]


def _calls() -> list[int]:
  found = _integers(_STEPS_PER_EXECUTION)
  for per_call in found:
    if _STEPS.value % per_call:
      raise app.UsageError(
        f'--steps={_STEPS.value} is no multiple of {per_call}, one of '
        '--steps_per_execution: choose one that is.'
      )
  return found


def _settings() -> dict[str, Any]:
  chosen = (_NUM_PS, _BATCH, _STEPS, _BLOCKS, _ROUNDS)
  return {flag.name: flag.value for flag in chosen}


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  names = _chosen(_PEERS, [peer.name for peer in catalogue.PEERS])
  peers = [peer for peer in catalogue.PEERS if peer.name in names]
  models, calls = _chosen(_MODELS, catalogue.MODELS), _calls()
  content = {
    'benchmark': 'parameter_server',
    **report.environment(),
    'settings': _settings(),
    'results': [],
  }
  with processes.ended_by_signals():
    for num_workers in _integers(_NUM_WORKERS):
      cases = run_num_workers(num_workers, peers, models, calls)
      print(f'\n{results.table(cases)}', flush=True)
      content['results'] += cases
      if _REPORT_JSON.value:
        report.write_json(_REPORT_JSON.value, content)


if __name__ == '__main__':
  app.run(main)
