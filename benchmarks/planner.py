"""What `tfs.plan` predicts beside what steps of communication take.

  python -m benchmarks.planner
  python -m benchmarks.planner --world_sizes=2,8 --link_rates=150mbit,700mbit

Workers on hosts of their own (benchmarks/network_namespaces.py; needs root) measure
their links, `tfs.plan` predicts each way to reduce the gradients of a model, and then
each way is taken. 'off' is how far the median is from the prediction; 'choice' what
the way that the plan prefers took, over the fastest of all.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

# TensorFlow reads it when it is imported.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
from absl import app, flags

from benchmarks import network_namespaces, processes, report, worker_pool
from tf_strategies import collectives, planning
from tf_strategies.launch import ports as ports_lib
from tf_strategies.planning import planner

_WORLD_SIZES = flags.DEFINE_list('world_sizes', '2,4,8', 'Numbers of workers.')
_RATES = flags.DEFINE_list(
  'link_rates', '150mbit,400mbit', "Rates of each host's link."
)
_WORKERS_PER_HOST = flags.DEFINE_integer(
  'workers_per_host', 1, 'Workers that share a link.', lower_bound=1
)
_VARIABLES = flags.DEFINE_list(
  'variables_bytes',
  '4096000,4000,4096000,4000,40000,40',
  'The gradients: by default a dense network of 2 million parameters.',
)
_COMPRESSIONS = flags.DEFINE_list(
  'compressions', ','.join(planner.COMPRESSIONS), 'Codecs to plan.'
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 5, 'Samples of each way.', lower_bound=1
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'Where to write the results as JSON.'
)


def run(world_size: int, rate: str) -> dict[str, Any]:
  """Plans and measures on hosts with links of one rate."""
  per_host = _WORKERS_PER_HOST.value
  sizes = [int(text) for text in _VARIABLES.value]
  with network_namespaces.NetworkNamespaces(
    -(-world_size // per_host), rate
  ) as hosts:
    places = [rank // per_host for rank in range(world_size)]
    ports = ports_lib.pick_ports(world_size)
    with worker_pool.WorkerPool(
      'planner',
      'benchmarks.planner_actor:Actor',
      [hosts.command(place, ()) for place in places],
    ) as pool:
      pool.ask(
        'set_up',
        addresses=[
          f'{hosts.addresses[place]}:{port}'
          for place, port in zip(places, ports, strict=True)
        ],
      )
      found = pool.ask('measure_links')[0]
      plan = planning.plan(
        sizes, _topology(found), compressions=_COMPRESSIONS.value
      )
      results = list(_measured(pool, plan, sizes))
  return {
    'world_size': world_size,
    'link_rate': rate,
    'probe_seconds': found['seconds'],
    'links': found['pairs'],
    'factors': found['factors'],
    'results': results,
    **{
      f'choice_{name}': _choice(plan, results, compression)
      for name, compression in (('exact', 'none'), ('any', None))
    },
  }


def _topology(found: dict[str, Any]) -> collectives.Topology:
  pairs = tuple(
    tuple(collectives.Link(*link) for link in row) for row in found['pairs']
  )
  size = found['group_size']
  return collectives.Topology(
    len(pairs),
    pairs[0][1],
    None if size is None else pairs[0][-1],
    size,
    found['gamma'],
    pairs,
    tuple((name, factor) for name, factor in found['factors']),
  )


def _measured(
  pool: worker_pool.WorkerPool, plan: planning.Plan, sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
  for way in plan.ways:
    by_rank = pool.ask(
      'run',
      buckets=planner.buckets_of(sizes, way.bucket_bytes),
      how={'algorithm': way.algorithm, 'compression': way.compression},
      repeats=_REPEATS.value,
    )
    seconds = [max(sample) for sample in zip(*by_rank, strict=True)]
    yield {
      **way.options(),
      'predicted_ms': 1e3 * way.seconds,
      'measured_ms': 1e3 * float(np.median(seconds)),
      'seconds': seconds,
    }


def _choice(plan, results, compression) -> float:
  """What the preferred way took, over the fastest."""
  best = plan.best(compression).options()
  allowed = [r for r in results if compression in (None, r['compression'])]
  [taken] = [r for r in allowed if all(r[name] == best[name] for name in best)]
  return taken['measured_ms'] / min(r['measured_ms'] for r in allowed)


def table(runs: Sequence[dict[str, Any]]) -> str:
  """One row for each way."""
  return report.markdown(
    [
      *('workers', 'rate', 'algorithm', 'compression', 'bucket MB'),
      *('predicted ms', 'measured ms', 'off'),
    ],
    [
      [
        *(run['world_size'], run['link_rate'], r['all_reduce']),
        *(r['compression'], r['bucket_bytes'] / 1e6),
        *(r['predicted_ms'], r['measured_ms']),
        f'{100 * (r["predicted_ms"] / r["measured_ms"] - 1):+.0f}%',
      ]
      for run in runs
      for r in run['results']
    ],
  )


def main(argv: Sequence[str]) -> None:
  """Runs the benchmark that the flags describe."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  report.check_target('report_json', _REPORT_JSON.value)
  for rate in _RATES.value:
    network_namespaces.bits_per_second(rate)
  os.environ.setdefault('TFS_SECRET', secrets.token_hex(16))
  content = {'benchmark': 'planner', **report.environment()}
  runs = []
  with processes.ended_by_signals():
    for world_size in map(int, _WORLD_SIZES.value):
      for rate in _RATES.value:
        runs.append(run(world_size, rate))
        print(
          f'{table(runs[-1:])}\n\nlinks measured in '
          f'{runs[-1]["probe_seconds"]:.1f} s; the choice took '
          f'{runs[-1]["choice_exact"]:.2f} of the fastest exact way, '
          f'{runs[-1]["choice_any"]:.2f} of the fastest\n',
          flush=True,
        )
  off = [
    abs(r['predicted_ms'] / r['measured_ms'] - 1)
    for one in runs
    for r in one['results']
  ]
  print(f'median off {100 * np.median(off):.0f}%, most {100 * max(off):.0f}%')
  if _REPORT_JSON.value:
    report.write_json(_REPORT_JSON.value, content | {'runs': runs})


if __name__ == '__main__':
  app.run(main)
