"""All-reduce between processes: ours, TensorFlow's, gloo and MPI.

  python -m benchmarks.process_all_reduce
  python -m benchmarks.process_all_reduce --world_sizes=2 --link_rate=1gbit
  python -m benchmarks.process_all_reduce --sizes_bytes=4096 --rounds=2 \
    --peers=ours_tcp,mwms_ring --report_json=process_all_reduce.json

Every peer sums one float32 array over all workers. The processes of all peers
run during the whole benchmark and take turns: one peer computes, the others wait
for a command. Each sample begins with a barrier and is the time of the slowest
rank. Every rank's sums are compared with the exact ones before the measurement.

With --link_rate each worker runs on its own simulated host. Links of that rate
connect the hosts (benchmarks/network_namespaces.py, which needs root).
"""

import contextlib
import os
import secrets
import sys
from collections.abc import Sequence

# TensorFlow reads it during import.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

from absl import app, flags

from benchmarks import (
  measure,
  network_namespaces,
  process_pools,
  process_results,
  processes,
  report,
  worker_pool,
)
from benchmarks.process_peers import catalogue

_WORLD_SIZES = flags.DEFINE_list('world_sizes', '2,4', 'Numbers of workers.')
_SIZES = flags.DEFINE_list(
  'sizes_bytes',
  '4096,65536,1048576,25000000,104857600',
  'Sizes of the float32 array in bytes.',
)
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Turns per peer.', lower_bound=1)
_REPEATS = flags.DEFINE_integer(
  'repeats', 3, 'Samples per turn.', lower_bound=1
)
_WARMUP = flags.DEFINE_integer(
  'warmup', 1, 'Warm-up calls per turn.', lower_bound=0
)
_PEERS = flags.DEFINE_list(
  'peers', None, f'Any of {",".join(catalogue.NAMES)}. Default: all.'
)
_TORCH_PYTHON = flags.DEFINE_string(
  'torch_python', sys.executable, 'Interpreter with torch, for gloo.'
)
_LINK_RATE = flags.DEFINE_string(
  'link_rate', None, "Rate of each worker's link, such as 1gbit or 200mbit."
)
_DEADLINE_SECONDS = flags.DEFINE_float(
  'deadline_seconds',
  worker_pool.DEADLINE_SECONDS,
  'Maximum duration of a turn.',
  lower_bound=1.0,
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)


def run_size(
  pools: process_pools.PeerPools, num_bytes: int
) -> process_results.Size:
  """Measures all peers on one size, in turns."""
  calls = process_results.calls_in_a_sample(num_bytes)
  names = [entry.name for entry in pools.entries]
  for name in names:
    pools.ask(name, 'prepare', num_bytes=num_bytes)
  seconds = {name: [] for name in names}
  for order in measure.turns(names, _ROUNDS.value):
    for name in order:
      seconds[name] += pools.run(name, _WARMUP.value, _REPEATS.value, calls)
  for name in names:
    pools.ask(name, 'release')
  return process_results.Size(pools.world_size, num_bytes, calls, seconds)


def run_world_size(
  world_size: int, sizes: Sequence[int], entries: Sequence[catalogue.Entry]
) -> tuple[list[process_results.Size], dict[str, object]]:
  """Measures all peers with one number of workers.

  Returns:
    The results for each size, and the part of the report for this world size.
  """
  with contextlib.ExitStack() as stack:
    hosts = None
    if _LINK_RATE.value is not None:
      hosts = stack.enter_context(
        network_namespaces.NetworkNamespaces(world_size, _LINK_RATE.value)
      )
    _progress(f'{world_size} workers: starting them')
    pools = stack.enter_context(
      process_pools.PeerPools(
        world_size,
        entries,
        hosts,
        _TORCH_PYTHON.value,
        _DEADLINE_SECONDS.value,
      )
    )
    found = []
    for num_bytes in sizes:
      _progress(f'{world_size} workers: {num_bytes} bytes')
      found.append(run_size(pools, num_bytes))
    return found, {'world_size': world_size, 'versions': pools.versions}


def _print(found: Sequence[process_results.Size]) -> None:
  print(
    f'\n{found[0].world_size} workers\n\n'
    f'Median ms (p10-p90)\n\n{process_results.times_table(found)}',
    flush=True,
  )
  ratios = process_results.ratios_table(found)
  if ratios:
    print(
      f'\nRatios of medians; below 1 the first is faster\n\n{ratios}',
      flush=True,
    )


def _integers(flag, least: int) -> list[int]:
  if not all(text.isdecimal() and int(text) >= least for text in flag.value):
    raise app.UsageError(
      f'--{flag.name}={",".join(flag.value)}: write integers of {least} or '
      'more, with commas between them.'
    )
  return [int(text) for text in flag.value]


def _entries() -> tuple[list[catalogue.Entry], dict[str, str]]:
  """Returns the available peers, and the reasons why others are unavailable."""
  names = _PEERS.value or catalogue.NAMES
  unknown = sorted(set(names) - set(catalogue.NAMES))
  if unknown:
    raise app.UsageError(
      f'--peers: {unknown[0]!r} is none of {", ".join(catalogue.NAMES)}.'
    )
  chosen, skipped = [], {}
  for entry in catalogue.ENTRIES:
    if entry.name not in names:
      continue
    reason = catalogue.reason_unavailable(
      entry, _TORCH_PYTHON.value, _LINK_RATE.value is not None
    )
    if reason is None:
      chosen.append(entry)
    else:
      skipped[entry.name] = reason
      print(f'Without {entry.name}. {reason}', flush=True)
  if not chosen:
    raise app.UsageError('None of the chosen --peers can run here.')
  return chosen, skipped


def _settings() -> dict[str, object]:
  return {
    'rounds': _ROUNDS.value,
    'repeats': _REPEATS.value,
    'warmup': _WARMUP.value,
    'link_rate': _LINK_RATE.value,
  }


def _progress(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  world_sizes = _integers(_WORLD_SIZES, 2)
  sizes = _integers(_SIZES, 4)
  if _LINK_RATE.value is not None:
    network_namespaces.bits_per_second(_LINK_RATE.value)  # Reports a typo now.
  # The workers authenticate with it, also beyond loopback.
  os.environ.setdefault('TFS_SECRET', secrets.token_hex(16))
  entries, skipped = _entries()
  content = {
    'benchmark': 'process_all_reduce',
    **report.environment(),
    'settings': _settings(),
    'skipped': skipped,
    'links': [],
    'results': [],
  }
  with processes.ended_by_signals():
    for world_size in world_sizes:
      found, about = run_world_size(world_size, sizes, entries)
      _print(found)
      content['links'].append(about)
      content['results'] += [size.record() for size in found]
      if _REPORT_JSON.value:
        report.write_json(_REPORT_JSON.value, content)


if __name__ == '__main__':
  app.run(main)
