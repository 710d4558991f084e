"""Measures the time from a `kill -9` of a worker to the next step of the others.

  python -m benchmarks.recovery
  python -m benchmarks.recovery --kills=100 --width=2000

Three workers train a model with `tfs.elastic`. A random one is killed at a random
moment and started again. When all three train again, the next one is killed. A sample is
the time from the kill to the first step that both other workers have committed without
it.

'step ms' is the median time between two steps of three workers. 'rejoin s' is the time
from the restart of a killed worker's process to the first step of three workers. Most of
it is the import of TensorFlow.
"""

import json
import pathlib
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import processes, report
from tf_strategies.launch import ports as ports_lib

_NUM_WORKERS = 3
_WORKER = pathlib.Path(__file__).with_name('recovery_worker.py')

_KILLS = flags.DEFINE_integer('kills', 40, 'Number of kills.', lower_bound=1)
_WIDTH = flags.DEFINE_integer(
  'width', 300, 'Units of each of the two hidden layers.', lower_bound=1
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Seed of the moments and the killed workers.'
)


class Job:
  """The workers of the job."""

  def __init__(self, directory: str):
    self._directory = pathlib.Path(directory)
    self._commands: dict[int, processes.Command] = {}
    self._starts = 0
    ports = ports_lib.pick_ports(_NUM_WORKERS)
    self._cluster = {'worker': [f'127.0.0.1:{port}' for port in ports]}
    self._secret = secrets.token_hex(16)
    for rank in range(_NUM_WORKERS):
      self.start(rank)

  def start(self, rank: int) -> None:
    """Starts a worker, which writes its steps to a new file."""
    self._starts += 1
    path = self._directory / f'{rank}-{self._starts}'
    task = {'type': 'worker', 'index': rank}
    config = json.dumps({'cluster': self._cluster, 'task': task})
    self._commands[rank] = processes.Command(
      [sys.executable, str(_WORKER), str(path), str(_WIDTH.value)],
      name=f'worker {rank}',
      env=processes.python_environment(
        {'TF_CONFIG': config, 'TFS_SECRET': self._secret}
      ),
      deadline_seconds=3600,
    )
    self._commands[rank].path = path

  def kill(self, rank: int) -> float:
    """Kills a worker, and returns the time."""
    self._commands[rank].kill()
    return time.time()

  def steps(self, rank: int) -> list[tuple[float, int]]:
    """Returns the end time and the number of workers of each step of a worker."""
    path = self._commands[rank].path
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split() for line in lines]
    return [(float(f[0]), int(f[1])) for f in found if len(f) == 3]

  def wait_for(self, ranks: Sequence[int], workers: int, since: float) -> float:
    """Waits until all `ranks` commit a step of `workers` workers. Returns the time."""

    def first(rank):
      after = [t for t, n in self.steps(rank) if t > since and n == workers]
      return min(after, default=None)

    one = self._commands[ranks[0]]
    one.wait_until(lambda: all(first(rank) is not None for rank in ranks))
    return max(first(rank) for rank in ranks)

  def close(self) -> None:
    """Ends all workers."""
    for command in self._commands.values():
      command.close()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()


def measure() -> dict[str, object]:
  """Returns the samples, in the format of the JSON report."""
  chance = random.Random(_SEED.value)
  seconds, rejoins, steps = [], [], []
  with tempfile.TemporaryDirectory() as directory, Job(directory) as job:
    everybody = list(range(_NUM_WORKERS))
    job.wait_for(everybody, _NUM_WORKERS, 0.0)
    for _ in range(_KILLS.value):
      time.sleep(chance.uniform(0.5, 1.5))
      victim = chance.randrange(_NUM_WORKERS)
      others = [rank for rank in everybody if rank != victim]
      times = [t for t, n in job.steps(others[0]) if n == _NUM_WORKERS]
      steps += list(np.diff(times[-20:]))
      killed = job.kill(victim)
      seconds.append(job.wait_for(others, _NUM_WORKERS - 1, killed) - killed)
      began = time.time()
      job.start(victim)
      rejoins.append(job.wait_for(everybody, _NUM_WORKERS, began) - began)
  return record(seconds, rejoins, steps)


def record(
  seconds: Sequence[float], rejoins: Sequence[float], steps: Sequence[float]
) -> dict[str, object]:
  """Returns the samples and their percentiles.

  Args:
    seconds: seconds from each kill to the next step of the others.
    rejoins: seconds from each restart to the next step of all workers.
    steps: seconds of each step of all workers.
  """
  return {
    'peer': 'ours',
    'kills': len(seconds),
    **{
      name: float(np.percentile(seconds, q))
      for name, q in (('median_s', 50), ('p90_s', 90), ('p99_s', 99))
    },
    'most_s': max(seconds),
    'median_step_ms': 1e3 * float(np.median(steps)),
    'median_rejoin_s': float(np.median(rejoins)),
    'seconds': list(seconds),
    'rejoin_seconds': list(rejoins),
  }


def table(results: Sequence[Mapping[str, Any]]) -> str:
  """Returns the results as a Markdown table."""
  times = ('median_s', 'p90_s', 'p99_s', 'most_s')
  return report.markdown(
    [
      *('peer', 'kills', 'median s', '90 %', '99 %', 'max'),
      *('step ms', 'rejoin s'),
    ],
    [
      [
        *(found['peer'], found['kills']),
        *(f'{found[name]:.3f}' for name in times),
        f'{found["median_step_ms"]:.1f}',
        f'{found["median_rejoin_s"]:.1f}',
      ]
      for found in results
    ],
  )


def main(argv):
  """Runs the benchmark, and prints the table."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  settings = (_KILLS, _WIDTH, _SEED)
  content = {
    'benchmark': 'recovery',
    **report.environment(),
    'settings': {flag.name: flag.value for flag in settings},
  }
  with processes.ended_by_signals():
    results = [measure()]
  print(table(results))
  if _REPORT_JSON.value:
    report.write_json(_REPORT_JSON.value, content | {'results': results})


if __name__ == '__main__':
  app.run(main)
