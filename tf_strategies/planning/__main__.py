"""Measures the links of a job and says how its gradients should travel.

  tfs launch --num_workers=2 -- tfs plan --variables_bytes=6250000,5000
  tfs plan --model=model.keras --world_sizes=16,256 --latency_us=50

Each task of the job runs it; the first prints. --world_sizes adds what the same links
would be between other numbers of workers: simulated, not measured. Outside of a job
nothing is measured: links are as --latency_us and --bandwidth_mb_per_s say.
"""

import json
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from tf_strategies import cluster as cluster_lib
from tf_strategies import errors, option_checks, process_group
from tf_strategies.cluster import command_line
from tf_strategies.collectives import cost_model
from tf_strategies.planning import planner

_FLAGS = (
  ('model', str, 'A .keras file.'),
  ('variables_bytes', [], 'In place of a model: bytes of each variable.'),
  ('world_sizes', [], 'Other numbers of workers, simulated.'),
  ('latency_us', 50.0, 'Of a link, where none is measured.'),
  ('bandwidth_mb_per_s', 1000.0, 'Of a link, where none is measured.'),
  ('report_json', str, 'Where to write all ways.'),
)


def _run(values: flags.FlagValues, words: list[str]) -> int:
  if (values.model is None) != bool(values.variables_bytes):
    raise flags.Error('expected one of --model and --variables_bytes')
  for name in ('latency_us', 'bandwidth_mb_per_s'):
    rate = values[name].value
    is_rate = option_checks.is_number(rate, least=1e-6)
    option_checks.check(
      is_rate, f'--{name}={rate}', 'a number above 0', 'leave it out'
    )
  others = _numbers(values, 'world_sizes')
  sizes = _numbers(values, 'variables_bytes')
  try:
    if values.model is not None:
      sizes = _sizes_of(values.model)
    topology, is_first = _measured()
    if not is_first:
      return 0
    plans = [
      planner.plan(sizes, t) for t in _topologies(values, topology, others)
    ]
  except (errors.Error, ValueError) as e:
    print(e, file=sys.stderr)
    return 1
  for plan in plans:
    best = plan.best()
    print(
      f'{plan}\nTake tfs.RingOptions(all_reduce={best.algorithm!r}, '
      f'bucket_bytes={best.bucket_bytes}).\n'
    )
  if values.report_json:
    try:
      with open(values.report_json, 'w', encoding='utf-8') as file:
        json.dump([_record(plan) for plan in plans], file, indent=1)
    except OSError as e:
      print(f'--report_json: {e}', file=sys.stderr)
      return 1
  return 0


def main(argv: Sequence[str]) -> int:
  """Plans for the flags; the first task of a job prints."""
  return command_line.main(
    argv, 'tf_strategies.planning', __doc__, _FLAGS, _run, words=''
  )


def _numbers(values: flags.FlagValues, flag: str) -> list[int]:
  texts = values[flag].value
  try:
    return [int(text) for text in texts]
  except ValueError as e:
    raise flags.Error(f'--{flag}={",".join(texts)}: {e}') from e


def _sizes_of(path: str) -> list[int]:
  import keras  # It takes seconds; sizes alone need none of it.

  return planner.sizes_of(keras.saving.load_model(path, compile=False))


def _measured() -> tuple[cost_model.Topology | None, bool]:
  """What this job's links cost, None without a job; whether this task prints."""
  cluster = cluster_lib.ClusterConfig.from_env()
  if cluster is None:
    return None, True
  places = dict(enumerate(task.address for task in cluster.training_tasks))
  rank = cluster.training_index
  if rank is None:
    return None, False
  with (
    process_group.Rendezvous(
      places, rank, process_group.GroupOptions.from_env()
    ) as meeting,
    meeting.form() as group,
  ):
    topology = group.measure_links()
    group.barrier()
    return topology, rank == 0


def _topologies(
  values: flags.FlagValues,
  measured: cost_model.Topology | None,
  others: Sequence[int],
) -> Iterator[cost_model.Topology]:
  """Those to plan for: the measured one, and its links between other numbers."""
  start = measured
  if start is None:
    link = cost_model.Link(
      1e-6 * values.latency_us, 1e-6 / values.bandwidth_mb_per_s
    )
    start = cost_model.Topology(2, link)
  if measured is not None or not others:
    yield start
  for world_size in others:
    yield planner.extrapolate(start, world_size)


def _record(plan: planner.Plan) -> dict[str, object]:
  return {
    'world_size': plan.topology.world_size,
    'is_measured': plan.is_measured,
    'parameter_bytes': plan.parameter_bytes,
    'ways': [{**way.options(), 'seconds': way.seconds} for way in plan.ways],
  }


if __name__ == '__main__':
  sys.exit(main(sys.argv))
