"""Measures the cost of strategies on a GPU, in at most twelve minutes.

  python -m benchmarks.gpu --data_path=mnist.npz --report_json=gpu.json
  python -m benchmarks.gpu --device=cpu             small sizes, to try it out
  python -m benchmarks.gpu --parts=step,workers

* step: trains a transformer of 110 million parameters in bfloat16, without a strategy
  and under each strategy, some of them also compiled by XLA. Virtual GPUs share one
  GPU and the batch is the same, so the ratio is the strategy's cost.
* workers: trains in two processes on the GPU, over the ring and with torch's DDP over
  gloo.
* all_reduce: reduces over two and four devices of one process, by ours and by
  TensorFlow's algorithms.
* links: measures the cost of a copy between devices, and between device and host.
* mnist: trains both examples to an accuracy of 0.985.
* servers: trains two workers with a parameter server.
* startup: measures the seconds until a process has run an operation.

Each figure is printed and saved in the report immediately. Each part has one or two
jobs, which run one after the other. A job gets a share of the remaining time. When
that has passed, the job is ended, its rows are kept, and the next job begins. The
exit status is 1 if a part failed or was cut off.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags

from benchmarks import gpu_parts, processes, report
from tf_strategies import errors
from tf_strategies.launch import ports

# Parts, the most important first, with the seconds of each of their jobs out of 720.
SHARES = {
  'step': (180, 100),
  'workers': (30, 60),
  'all_reduce': (55, 55),
  'links': (25,),
  'mnist': (40, 40),
  'servers': (40,),
  'startup': (15,),
}
_PARTS = flags.DEFINE_list(
  'parts', list(SHARES), f'Parts to run: {",".join(SHARES)}.'
)
_DEVICE = flags.DEFINE_enum(
  'device', 'gpu', ['gpu', 'cpu'], 'Device. On CPUs, sizes are small.'
)
_DATA_PATH = flags.DEFINE_string(
  'data_path', None, 'MNIST as .npz. Default: digits of scikit-learn.'
)
_LIMIT = flags.DEFINE_float(
  'limit_seconds', 720.0, 'Time limit of all parts.', lower_bound=1.0
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', 'gpu.json', 'JSON file for the rows.'
)

# Fields of rows that tables do not show.
_HIDDEN = (
  *('num_samples', 'loss', 'row_seconds', 'num_tensors', 'num_bytes', 'kind'),
  *('algorithm_bandwidth_gb_per_s', 'bus_bandwidth_gb_per_s'),
  *('busiest_bytes_in', 'copy_seconds', 'alpha_seconds'),
  *('beta_seconds_per_byte',),
)
# Maximum relative difference between losses of the same steps in bfloat16.
_TOLERANCE = 0.02
# Tasks of the jobs with several. The first task measures, and ends by itself.
_TASKS = {
  'workers': [('worker', 0), ('worker', 1)],
  'servers': [('chief', 0), ('ps', 0), ('worker', 0), ('worker', 1)],
}


def programs(
  part: str, number: int, ends_at: float, directory: str
) -> list[tuple[list[str], dict[str, str]]]:
  """Returns the arguments of Python and the environment of each process of a job.

  Args:
    part: name of the part.
    number: number of the job in its part.
    ends_at: monotonic time at which the job is ended.
    directory: directory in which the processes wait for each other.
  """
  path = _DATA_PATH.value and os.path.abspath(_DATA_PATH.value)

  def words(index: int) -> list[str]:
    began = time.monotonic()
    job = gpu_parts.Job(
      _DEVICE.value, number, began, ends_at, path, index, directory
    )
    return ['-m', 'benchmarks.gpu_parts', part, json.dumps(vars(job))]

  if part == 'step':
    return [(words(i), {}) for i in range(len(gpu_parts.STEPS[number]))]
  tasks = _TASKS.get(part, [])
  cluster: dict[str, list[str]] = {}
  for (name, _), port in zip(tasks, ports.pick_ports(len(tasks)), strict=True):
    cluster.setdefault(name, []).append(f'127.0.0.1:{port}')
  found = []
  for i, (name, index) in enumerate(tasks):
    task = {'cluster': cluster, 'task': {'type': name, 'index': index}}
    # Otherwise a call to a server that has ended waits for its return.
    env = {'TF_CONFIG': json.dumps(task), 'GRPC_FAIL_FAST': 'use_caller'}
    if name == 'ps':
      env['CUDA_VISIBLE_DEVICES'] = '-1'
    found.append((words(i), env))
  return found or [(words(0), {})]


def rows_of(part: str, number: int, ends_at: float) -> Iterator[dict[str, Any]]:
  """Starts the processes of a job, and yields the measured rows.

  Raises:
    TimeoutError: if it did not end in time.
    WorkerUnavailableError: if it failed.
  """
  # TensorFlow reads it during import. Processes share the GPU.
  shared = {'TF_FORCE_GPU_ALLOW_GROWTH': 'true'}
  if _DEVICE.value == 'cpu':
    shared['CUDA_VISIBLE_DEVICES'] = '-1'
  with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    commands = []
    started = programs(part, number, ends_at, directory)
    for index, (words, env) in enumerate(started):
      command = processes.Command(
        [sys.executable, *words],
        name='the process',
        env=processes.python_environment({**shared, **env}),
        log=pathlib.Path(directory, f'{index}.out'),
        error_log=pathlib.Path(directory, f'{index}.err'),
      )
      commands.append(stack.enter_context(command))
    if part in _TASKS:
      commands = commands[:1]
    seen = dict.fromkeys(commands, 0)
    is_alive = True
    while is_alive:
      time.sleep(0.05)
      is_alive = any(command.is_alive() for command in commands)
      for command in commands:
        lines = command.output().split('\n')[:-1]
        new = lines[seen[command] :]
        seen[command] = len(lines)
        yield from (json.loads(x) for x in new if x.startswith('{'))
      if is_alive and time.monotonic() > ends_at:
        raise TimeoutError('cut off')
    for command in commands:
      if command.process.returncode:
        command.fail(f'ended with status {command.process.returncode}')


def add_ratio(rows: Sequence[dict[str, Any]]) -> None:
  """Adds to the last row its ratio to the row without a strategy or of torch.

  Adds an error if the loss differs from the one without a strategy.

  Example:

    >>> rows = [{'by': 'torch', 'exposed_ms': 8.0}, {'exposed_ms': 2.0}]
    >>> add_ratio(rows)
    >>> rows[-1]['ratio_to_torch']
    0.25
  """
  *others, last = rows
  for row in others:
    if (
      row.get('by') == 'torch'
      and row.get('exposed_ms')
      and last.get('exposed_ms')
    ):
      last['ratio_to_torch'] = last['exposed_ms'] / row['exposed_ms']
  for row in [r for r in rows if 'loss' in r and 'loss' in last]:
    if row.get('strategy') == 'none' and row['xla'] == last['xla']:
      last['ratio_to_none'] = last['median_ms'] / row['median_ms']
      if abs(last['loss'] / row['loss'] - 1) > _TOLERANCE:
        last['error'] = f'Expected a loss near {row["loss"]:.4f}.'


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the rows of a part as a Markdown table."""
  columns = [
    c for c in dict.fromkeys(itertools.chain(*rows)) if c not in _HIDDEN
  ]
  return report.markdown(
    columns, [[row.get(c) for c in columns] for row in rows]
  )


def _driver() -> str | None:
  """Returns the version of the GPU's driver, or None if it is unknown."""
  with contextlib.suppress(errors.WorkerUnavailableError):
    query = ['--query-gpu=driver_version', '--format=csv,noheader']
    done = processes.run(
      ['nvidia-smi', *query], is_checked=True, deadline_seconds=20.0
    )
    return done.stdout.split('\n')[0]
  return None


def run(
  parts: Sequence[str], limit_seconds: float, path: str
) -> dict[str, Any]:
  """Runs the jobs of the parts, and returns the report.

  Args:
    parts: names of parts, in any order.
    limit_seconds: time limit of all jobs.
    path: path of the report, which is written again after each row.
  """
  ends_at = time.monotonic() + limit_seconds
  content: dict[str, Any] = {'benchmark': 'gpu', 'command': report.command()}
  content |= {'driver': _driver()}
  content['settings'] = gpu_parts.SIZES[_DEVICE.value]
  results: dict[str, list[dict[str, Any]]] = {}
  failures: list[str] = []
  content |= {'failures': failures, 'results': results}
  jobs = [
    (part, number, share)
    for part, shares in SHARES.items()
    if part in parts
    for number, share in enumerate(shares)
  ]
  for position, (part, number, share) in enumerate(jobs):
    rows = results.setdefault(part, [])
    began = time.monotonic()
    seconds = (ends_at - began) * share / sum(s for *_, s in jobs[position:])
    name = f'{part} {number + 1}, {seconds:.0f} s'
    print(f'{name} at most', flush=True)
    until = began + seconds
    try:
      for row in rows_of(part, number, until):
        if 'environment' in row:
          content.update({**row['environment'], **content})
        else:
          rows.append(row)
          add_ratio(rows)
          line = f'{part}: {json.dumps(row)}'
          print(line, flush=True)
          if 'error' in row:
            failures.append(line)
        report.write_json(path, content)
    except (TimeoutError, errors.WorkerUnavailableError) as e:
      failures.append(f'{name}: {e}')
      print(failures[-1], flush=True)
  report.write_json(path, content)
  return content


def main(argv: Sequence[str]) -> None:
  """Measures the parts of the flag."""
  unknown = sorted(set(_PARTS.value) - set(SHARES))
  if len(argv) > 1 or unknown:
    raise app.UsageError(
      f'{[*argv[1:], *unknown][0]!r}: write --parts={",".join(SHARES)}.'
    )
  report.check_target('report_json', _REPORT_JSON.value)
  began = time.monotonic()
  with processes.ended_by_signals():
    content = run(_PARTS.value, _LIMIT.value, _REPORT_JSON.value)
  hardware, versions = content.get('hardware', {}), content.get('versions', {})
  print(
    f'\n{hardware.get("gpus")}, driver {content["driver"]}, TensorFlow '
    f'{versions.get("tensorflow")}, Keras {versions.get("keras")}, '
    f'{time.monotonic() - began:.0f} s'
  )
  for part, rows in content['results'].items():
    print(f'\n{part}\n\n{table(rows)}')
  if content['failures']:
    sys.exit('\n'.join(['', 'Failed or cut off:', *content['failures']]))


if __name__ == '__main__':
  app.run(main)
