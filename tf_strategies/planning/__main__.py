"""Measures the links of a job and says how its gradients should travel.

  python -m tf_strategies.launch --num_workers=2 -- \\
    python -m tf_strategies.planning --variables_bytes=6250000,5000
  python -m tf_strategies.planning --model=model.keras --world_sizes=16,256 \\
    --latency_us=50 --bandwidth_mb_per_s=1000

Each task of the job runs it; the first prints. --world_sizes adds what the same links
would be between other numbers of workers: simulated, not measured. Outside of a job
nothing is measured: links are as --latency_us and --bandwidth_mb_per_s say.
"""

import json
import sys
from collections.abc import Iterator, Sequence

from absl import app, flags

from tf_strategies import cluster as cluster_lib
from tf_strategies import errors, process_group
from tf_strategies.collectives import cost_model
from tf_strategies.planning import planner


def define_flags() -> None:
  """Defines the command's flags; called by the command alone."""
  flags.DEFINE_string('model', None, 'A .keras file.')
  flags.DEFINE_list(
    'variables_bytes', None, 'In place of a model: bytes of each variable.'
  )
  flags.DEFINE_list('world_sizes', [], 'Other numbers of workers, simulated.')
  flags.DEFINE_float('latency_us', 50.0, 'Of a link, where none is measured.')
  flags.DEFINE_float(
    'bandwidth_mb_per_s',
    1000.0,
    'Of a link, where none is measured.',
    lower_bound=1e-6,
  )
  flags.DEFINE_string('report_json', None, 'Where to write all ways.')


def main(argv: Sequence[str]) -> int:
  """Plans for the flags; the first task of a job prints."""
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]!r} is not a flag.')
  values = flags.FLAGS
  if (values.model is None) == (values.variables_bytes is None):
    raise app.UsageError('Expected one of --model and --variables_bytes.')
  try:
    sizes = _sizes()
    others = _numbers('world_sizes')
    topology, is_first = _measured()
    if not is_first:
      return 0
    plans = [planner.plan(sizes, t) for t in _topologies(topology, others)]
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


def _numbers(flag: str) -> list[int]:
  texts = getattr(flags.FLAGS, flag)
  try:
    return [int(text) for text in texts]
  except ValueError as e:
    raise app.UsageError(f'--{flag}={",".join(texts)}: {e}') from e


def _sizes() -> list[int]:
  if flags.FLAGS.variables_bytes is not None:
    return _numbers('variables_bytes')
  import keras  # It takes seconds; sizes alone need none of it.

  model = keras.saving.load_model(flags.FLAGS.model, compile=False)
  return planner.sizes_of(model)


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
  measured: cost_model.Topology | None, others: Sequence[int]
) -> Iterator[cost_model.Topology]:
  """Those to plan for: the measured one, and its links between other numbers."""
  start = measured
  if start is None:
    link = cost_model.Link(
      1e-6 * flags.FLAGS.latency_us, 1e-6 / flags.FLAGS.bandwidth_mb_per_s
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
  define_flags()
  app.run(main)
