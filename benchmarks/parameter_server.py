"""Training with parameter servers: ours beside TensorFlow's strategy.

  python -m benchmarks.parameter_server
  python -m benchmarks.parameter_server --models=cnn --num_workers=2 --rounds=2
  python -m benchmarks.parameter_server --straggler_ms=100

'stock' is tf.distribute.ParameterServerStrategy with a loop by hand, as its
tutorial has it: a data set on each worker, a Keras optimizer, a closure a step.
'ours' is Keras's `fit` under tfs.ParameterServerStrategy on data that the
workers read, 'ours_fed' on batches that the coordinator hands out. All train
the same model from the same weights on the same data, with Adam (25 MB: SGD
with momentum); `fit` also keeps a mean of the loss, which 'stock' does not.

Each peer has a cluster of processes of its own, on this machine. They are alive
for the whole run and take turns. A turn begins with a block to warm up. Each
block begins and ends with no step on the way; what happens between blocks (the
ends of epochs) is not measured. After each turn the optimizer's count of steps
must be exact; that of 'stock' misses steps that workers count at the same time
('steps counted'). 'ps balance' is the CPU time of the busiest server over that
of the least busy one.

With --straggler_ms one worker waits that long in each step, and our modes are
compared instead. The wait is a layer in front of the model: a tf.data pipeline
that sleeps in C++, as long as a file in the worker's own directory says (see
benchmarks/parameter_server_peers/models.py), so it takes no CPU from the
others, which share this machine. Every mode is fed by the coordinator and sees
as many rows: the synchronous ones share out batches of --per_replica_batch_size
rows for each worker, the others send a batch of that size to a worker. So
compare examples/s rather than steps/s. The time to a loss starts with the first
step; the loss is a mean over the rows of --window_steps steps of one worker at
least, and read ten times a second at most.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

# TensorFlow reads it when it is imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import measure, processes, report, worker_pool
from benchmarks.parameter_server_peers import catalogue, jobs, results

_MODELS = flags.DEFINE_list(
  'models',
  None,
  f'Which of {",".join(catalogue.MODELS)}. Default: all; with a straggler, '
  f'{catalogue.MODELS[0]}.',
)
_PEERS = flags.DEFINE_list(
  'peers',
  None,
  f'Which of {",".join(p.name for p in catalogue.PEERS)}; with a straggler, of '
  f'{",".join(p.name for p in catalogue.MODES)}. Default: all.',
)
_NUM_WORKERS = flags.DEFINE_list(
  'num_workers',
  None,
  'Numbers of workers. Default: 1,2,4; with a straggler, 3.',
)
_NUM_PS = flags.DEFINE_integer('num_ps', 2, 'Parameter servers.', lower_bound=1)
_STEPS_PER_EXECUTION = flags.DEFINE_list(
  'steps_per_execution', '1,10', 'Steps in one call; a straggler: always 1.'
)
_BATCH = flags.DEFINE_integer(
  'per_replica_batch_size', 64, 'Rows of a worker.', lower_bound=1
)
_STEPS = flags.DEFINE_integer(
  'steps', 300, 'Steps of a block, of all workers together.', lower_bound=1
)
_BLOCKS = flags.DEFINE_integer(
  'blocks', 2, 'Samples in each turn, after one to warm up.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  'rounds', 5, 'Turns of each peer.', lower_bound=1
)
_STRAGGLER_MS = flags.DEFINE_float(
  'straggler_ms',
  0.0,
  'How long one worker waits in each step; compares our modes.',
  lower_bound=0.0,
)
_TARGET_LOSS = flags.DEFINE_float(
  'target_loss', 1.0, 'With a straggler: the loss to reach.', lower_bound=0.0
)
_WINDOW_STEPS = flags.DEFINE_integer(
  'window_steps', 12, 'With a straggler: steps of a mean loss.', lower_bound=1
)
_DEADLINE_SECONDS = flags.DEFINE_float(
  'deadline_seconds',
  worker_pool.DEADLINE_SECONDS,
  'How long a turn of a peer may take.',
  lower_bound=1.0,
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'Where to write the results as JSON.'
)
flags.DEFINE_alias('json', 'report_json')


def run_case(
  running: Sequence[jobs.Job], model: str, num_workers: int, per_call: int
) -> dict[str, Any]:
  """Measures all peers on one model, in turns; returns the records."""
  by_name = {job.peer.name: job for job in running}
  built = {
    name: job.ask(
      'set_up',
      model=model,
      steps_per_execution=per_call,
      batch_rows=_BATCH.value,
      pauses=False,
    )
    for name, job in by_name.items()
  }
  results.check_beginnings({n: b['loss'] for n, b in built.items()})
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
  """Measures all peers with one number of workers; returns the cases."""
  with contextlib.ExitStack() as stack:
    running = _start(stack, peers, num_workers)
    cases = []
    for model in models:
      for per_call in steps_per_execution:
        _progress(f'{num_workers} workers: {model}, {per_call} steps a call')
        cases.append(run_case(running, model, num_workers, per_call))
    return cases


def run_straggler(
  num_workers: int, peers: Sequence[catalogue.Peer], model: str
) -> dict[str, Any]:
  """Lets one worker be slow; returns what it does to each mode."""
  with contextlib.ExitStack() as stack:
    running = _start(stack, peers, num_workers)
    by_name = {job.peer.name: job for job in running}
    rows, losses = {}, {}
    for name, job in by_name.items():
      shares = num_workers if job.peer.shares_batches else 1
      rows[name] = shares * _BATCH.value
      losses[name] = job.ask(
        'set_up',
        model=model,
        steps_per_execution=1,
        batch_rows=rows[name],
        pauses=True,
      )['loss']
    results.check_beginnings(losses)
    turns = {name: [] for name in by_name}
    for number, order in enumerate(measure.turns(by_name, _ROUNDS.value), 1):
      _progress(f'{num_workers} workers: {model}, round {number}')
      for name in order:
        steps = max(1, _STEPS.value * _BATCH.value // rows[name])
        turn = by_name[name].ask(
          'race',
          warmup_steps=2 * num_workers,
          steps=steps,
          window_rows=_WINDOW_STEPS.value * _BATCH.value,
        )
        results.check_turn(name, turn, steps, losses[name])
        turns[name].append(turn)
  return {
    'model': model,
    'num_workers': num_workers,
    'peers': [
      results.straggler_record(n, found, rows[n], _TARGET_LOSS.value)
      for n, found in turns.items()
    ],
  }


def _start(
  stack: contextlib.ExitStack, peers: Sequence[catalogue.Peer], num_workers: int
) -> list[jobs.Job]:
  _progress(f'{num_workers} workers: starting {len(peers)} clusters')
  size = jobs.Size(num_workers, _NUM_PS.value)
  return [
    stack.enter_context(
      jobs.Job(peer, size, _STRAGGLER_MS.value, _DEADLINE_SECONDS.value)
    )
    for peer in peers
  ]


def _integers(flag, default: str) -> list[int]:
  texts = flag.value or default.split(',')
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


def _peers(all_of_them: Sequence[catalogue.Peer]) -> list[catalogue.Peer]:
  names = _chosen(_PEERS, [peer.name for peer in all_of_them])
  return [peer for peer in all_of_them if peer.name in names]


def _calls() -> list[int]:
  found = _integers(_STEPS_PER_EXECUTION, '1,10')
  for per_call in found:
    if _STEPS.value % per_call:
      raise app.UsageError(
        f'--steps={_STEPS.value} is no multiple of {per_call}, one of '
        '--steps_per_execution: choose one that is.'
      )
  return found


def _settings() -> dict[str, Any]:
  chosen = (
    *(_NUM_PS, _BATCH, _STEPS, _BLOCKS, _ROUNDS),
    *(_STRAGGLER_MS, _TARGET_LOSS, _WINDOW_STEPS),
  )
  return {flag.name: flag.value for flag in chosen}


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def _measure_peers(content: dict[str, Any]) -> None:
  peers, calls = _peers(catalogue.PEERS), _calls()
  models = _chosen(_MODELS, catalogue.MODELS)
  for num_workers in _integers(_NUM_WORKERS, '1,2,4'):
    cases = run_num_workers(num_workers, peers, models, calls)
    print(f'\n{results.table(cases)}', flush=True)
    content['results'] += cases
    _write(content)


def _measure_straggler(content: dict[str, Any]) -> None:
  peers = _peers(catalogue.MODES)
  models = _chosen(_MODELS, catalogue.MODELS) if _MODELS.value else ['cnn']
  for num_workers in _integers(_NUM_WORKERS, '3'):
    for model in models:
      case = run_straggler(num_workers, peers, model)
      print(
        f'\n{model}, {num_workers} workers, one of which waits '
        f'{_STRAGGLER_MS.value:g} ms a step; the loss is '
        f'{_TARGET_LOSS.value:g}\n\n{results.straggler_table(case["peers"])}',
        flush=True,
      )
      content['results'].append(case)
      _write(content)


def _write(content: dict[str, Any]) -> None:
  if _REPORT_JSON.value:
    report.write_json(_REPORT_JSON.value, content)


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  content = {
    'benchmark': 'parameter_server',
    **report.environment(),
    'settings': _settings(),
    'results': [],
  }
  with processes.ended_by_signals():
    if _STRAGGLER_MS.value > 0:
      _measure_straggler(content)
    else:
      _measure_peers(content)


if __name__ == '__main__':
  app.run(main)
