"""A step with an embedding table on parameter servers, by the table's size.

  python -m benchmarks.embeddings
  python -m benchmarks.embeddings --rows=10000,1000000 --optimizers=adagrad

A batch of ids, a table of rows and a dense layer; workers read the ids. 'ours' is
Keras's `Embedding`, optimizer and `fit` under tfs.ParameterServerStrategy (Adam in
`tfs.keras.LazyRows`, as by hand). 'by_hand' is TensorFlow's strategy with a `tf.Variable`, a
`tf.nn.embedding_lookup` of each different id and an update of these rows on the server.
'stock_keras' is TensorFlow's strategy with Keras's `Embedding` and optimizer: it moves
the whole table, so that by default it is run up to a million rows.

Peers take turns, each with a cluster of processes of its own on this machine. Bytes are
what went over loopback while a block was on the way, headers, acknowledgements and the
coordinator's calls included; run nothing else meanwhile. The bound is what a batch's
different rows and the dense layer are in both directions. The mean loss of the last
block of each peer must be below that of its first.
"""

import contextlib
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

# TensorFlow reads it when it is imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import measure, processes, report, worker_pool
from benchmarks.parameter_server_peers import catalogue, jobs

_PEERS = ('by_hand', 'ours', 'stock_keras')
_OPTIMIZERS = ('sgd', 'adagrad', 'adam')
_ROWS = flags.DEFINE_list(
  'rows', '10000,100000,1000000,4000000', 'Rows of the table.'
)
_WIDTH = flags.DEFINE_integer('width', 64, 'Values of a row.', lower_bound=1)
_BATCH = flags.DEFINE_integer(
  'batch_size', 1024, 'Ids of a step.', lower_bound=1
)
_CHOSEN_OPTIMIZERS = flags.DEFINE_list(
  'optimizers', ','.join(_OPTIMIZERS), 'Which optimizers.'
)
_CHOSEN_PEERS = flags.DEFINE_list('peers', ','.join(_PEERS), 'Which peers.')
_STOCK_ROWS = flags.DEFINE_integer(
  'most_rows_of_stock_keras', 1_000_000, 'Not run with larger tables.'
)
_NUM_WORKERS = flags.DEFINE_list('num_workers', '2', 'Numbers of workers.')
_NUM_PS = flags.DEFINE_integer('num_ps', 2, 'Parameter servers.', lower_bound=1)
_STEPS = flags.DEFINE_integer(
  'steps', 100, 'Steps of a block, of all workers together.', lower_bound=1
)
_STOCK_STEPS = flags.DEFINE_integer(
  'steps_of_stock_keras', 10, 'The same, where whole tables move.', 1
)
_BLOCKS = flags.DEFINE_integer(
  'blocks', 2, 'Samples in each turn, after one to warm up.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  'rounds', 3, 'Turns of each peer.', lower_bound=1
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'Where to write the results as JSON.'
)


def run_case(
  running: Sequence[jobs.Job], rows: int, optimizer: str, num_workers: int
) -> list[dict[str, Any]]:
  """Measures all peers on one table, in turns; returns their records."""
  by_name = {
    job.peer.name: job
    for job in running
    if job.peer.name != 'stock_keras' or rows <= _STOCK_ROWS.value
  }
  for job in by_name.values():
    job.ask(
      'set_up',
      rows=rows,
      width=_WIDTH.value,
      optimizer=optimizer,
      batch_rows=_BATCH.value,
    )
  turns = {name: [] for name in by_name}
  for order in measure.turns(by_name, _ROUNDS.value):
    for name in order:
      turns[name].append(
        by_name[name].ask('run', blocks=_BLOCKS.value, steps=_steps(name))
      )
  for job in by_name.values():
    job.ask('release')
  return [
    _record(name, found, rows, optimizer, num_workers)
    for name, found in turns.items()
  ]


def _steps(peer: str) -> int:
  return _STOCK_STEPS.value if peer == 'stock_keras' else _STEPS.value


def _record(name, turns, rows, optimizer, num_workers) -> dict[str, Any]:
  losses = [loss for turn in turns for loss in turn['losses']]
  if not losses[-1] < losses[0]:
    raise RuntimeError(
      f'{name}, {rows} rows, {optimizer}: the loss was {losses[0]} and is '
      f'{losses[-1]}. Its time would mean nothing.'
    )
  samples = [sample for turn in turns for sample in turn['samples']]
  steps = _steps(name)
  spread = measure.Spread.of([s['seconds'] / steps for s in samples])
  return {
    'peer': name,
    'rows': rows,
    'optimizer': optimizer,
    'num_workers': num_workers,
    **dataclasses.asdict(spread),
    'bytes_per_step': statistics.median(s['loopback_bytes'] for s in samples)
    / steps,
    'bound_bytes': bound_bytes(rows, _WIDTH.value, _BATCH.value),
    'losses': losses,
    'samples': samples,
  }


def bound_bytes(rows: int, width: int, batch_rows: int) -> float:
  """What a step has to move: its rows and the dense layer, there and back.

  Example:

    >>> bound_bytes(10**9, 64, 1024)
    524808.0
  """
  # Imported late: TensorFlow comes with it.
  from benchmarks.parameter_server_peers import tables

  unique = tables.unique_rows(rows, batch_rows)
  return 2 * 4 * (unique * width + width + 1)


def table(records: Sequence[dict[str, Any]]) -> str:
  """A row for each peer and table."""
  by_hand = {
    _case(r): r['median_ms'] for r in records if r['peer'] == 'by_hand'
  }
  return report.markdown(
    [
      *('rows', 'optimizer', 'workers', 'peer', 'ms a step'),
      *('÷ by hand', 'kB a step', '÷ bound'),
    ],
    [
      [
        *(r['rows'], r['optimizer'], r['num_workers'], r['peer']),
        r['median_ms'],
        r['median_ms'] / by_hand[_case(r)] if _case(r) in by_hand else None,
        r['bytes_per_step'] / 1e3,
        r['bytes_per_step'] / r['bound_bytes'],
      ]
      for r in records
    ],
  )


def _case(record):
  return record['rows'], record['optimizer'], record['num_workers']


def _check(flag, allowed: Sequence[str]) -> list[str]:
  unknown = sorted(set(flag.value) - set(allowed))
  if unknown:
    raise app.UsageError(
      f'--{flag.name}: {unknown[0]!r} is none of {", ".join(allowed)}.'
    )
  return [name for name in allowed if name in flag.value]


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  names, optimizers = (
    _check(_CHOSEN_PEERS, _PEERS),
    _check(_CHOSEN_OPTIMIZERS, _OPTIMIZERS),
  )
  content = {
    'benchmark': 'embeddings',
    **report.environment(),
    'settings': _settings(),
    'results': [],
  }
  with processes.ended_by_signals():
    for num_workers in map(int, _NUM_WORKERS.value):
      for rows in map(int, _ROWS.value):
        for optimizer in optimizers:
          print(
            f'{num_workers} workers: {rows} rows, {optimizer}',
            file=sys.stderr,
            flush=True,
          )
          content['results'] += _measured(names, rows, optimizer, num_workers)
          if _REPORT_JSON.value:
            report.write_json(_REPORT_JSON.value, content)
  print(f'\n{table(content["results"])}')


def _settings() -> dict[str, Any]:
  chosen = (_WIDTH, _BATCH, _NUM_PS, _STEPS, _STOCK_STEPS, _BLOCKS, _ROUNDS)
  return {flag.name: flag.value for flag in chosen}


def _measured(names, rows, optimizer, num_workers) -> list[dict[str, Any]]:
  """In clusters of its own for each table: no server keeps another's memory."""
  size = jobs.Size(num_workers, _NUM_PS.value)
  with contextlib.ExitStack() as stack:
    running = [
      stack.enter_context(
        jobs.Job(
          catalogue.Peer(name, is_fit=name == 'ours', is_fed=False),
          size,
          deadline_seconds=worker_pool.DEADLINE_SECONDS,
          coordinator='tables:Coordinator',
        )
      )
      for name in names
      if name != 'stock_keras' or rows <= _STOCK_ROWS.value
    ]
    return run_case(running, rows, optimizer, num_workers)


if __name__ == '__main__':
  app.run(main)
