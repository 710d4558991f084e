"""How much each stage of a running tf.data pipeline works, and how much it waits.

tf.data keeps a model of every iterator for its tuner, and
`tf.data.experimental.get_model_proto(iterator)` returns it; what follows is the
same in TensorFlow 2.18 and 2.21. A node of the model is one dataset of the
pipeline after TensorFlow's rewrites (`Map` and `BatchV2` may have become
`MapAndBatch`), named as its op: `TFRecord`, `ParallelInterleaveV4`,
`ParallelMapV2`, `Prefetch`.

- `processing_time`: nanoseconds in the node itself, without its inputs, summed
  over all threads that ran it. Of a map it is the time of the ops of its
  function, each op counted on its own; so two ops that run side by side count
  twice, the threads of one op once. Reading a file, and sleeping in a
  `numpy_function`, count as time of the node: it is busy, not computing.
  Waiting for an input, for room in a buffer, or in tf.data's sleep op, does not
  count.
- `num_elements`: how many came out; `buffered_elements`: how many are ready now.
- `parameters`: of a parallel node `parallelism`, whose `state_value` is how many
  calls may run at this moment. The tuner changes it.
- A file that an interleave opens is a node too, with an id of its own, and gone
  from the model as soon as it has been read. So the proto is read every few
  milliseconds, and what was last seen of every id is added up by name.

Hence `work_s / wall_s` of a stage is the mean number of threads that it kept
busy, and `utilisation`, the same over the threads that it may use, tells which
stage the others wait for: at 1 it never waits itself. What is gone between two
looks is missing: of many small files, some milliseconds.

Example:

  >>> import tensorflow as tf
  >>> from benchmarks.input_pipeline import stages
  >>> numbers = tf.data.Dataset.range(64).map(tf.square).batch(8)
  >>> profile = stages.profile(numbers, min_seconds=0)
  >>> profile.num_steps, 'map' in {stage.kind for stage in profile.stages}
  (8, True)
"""

from __future__ import annotations

import dataclasses
import time

import tensorflow as tf

from benchmarks.input_pipeline import model_watch
from tf_strategies import errors

_NANOSECONDS = 1e9
_MICROSECONDS = 1e6

# The beginning of a node's name, without `Parallel`; the first that fits.
_KINDS = (
  ('MapAndBatch', 'map'),
  ('Map', 'map'),
  ('Filter', 'map'),
  ('Scan', 'map'),
  ('Interleave', 'extract'),
  ('FlatMap', 'extract'),
  ('Generator', 'extract'),
  ('TFRecord', 'extract'),
  ('TextLine', 'extract'),
  ('FixedLength', 'extract'),
  ('Tensor', 'extract'),
  ('FromTensor', 'extract'),
  ('Range', 'extract'),
  ('Sleep', 'extract'),
  ('Batch', 'batch'),
  ('PaddedBatch', 'batch'),
  ('Unbatch', 'batch'),
  ('Shuffle', 'shuffle'),
  ('Cache', 'cache'),
  ('MemoryCache', 'cache'),
  ('Prefetch', 'prefetch'),
)


@dataclasses.dataclass(frozen=True)
class Stage:
  """What one kind of node did while a pipeline was watched.

  Attributes:
    name: of its nodes, as tf.data names them.
    kind: 'extract', 'map', 'batch', 'shuffle', 'cache', 'prefetch' or 'other'.
    in_interleave: whether it runs once for each file of an interleave.
    work_s: `processing_time` of all nodes of this name, in seconds.
    wait_s: seconds in which it waited for simulated storage.
    threads: how many calls may run at once, as the tuner left it.
    num_elements: how many came out.
    num_nodes: how many nodes there were: files, below an interleave.
    mean_buffered: elements that were ready, on average.
    utilisation: (work_s + wait_s) / (threads * wall_s).
  """

  name: str
  kind: str
  in_interleave: bool
  work_s: float
  wait_s: float
  threads: int
  num_elements: int
  num_nodes: int
  mean_buffered: float
  utilisation: float


@dataclasses.dataclass(frozen=True)
class Profile:
  """A pipeline that was watched for an epoch or more.

  Attributes:
    stages: the busiest first.
    wall_s: how long, without making iterators.
    num_steps: batches that came.
    num_files: how many elements interleaves opened.
    fetch_s: seconds in which the consumer waited for batches, without the
      first of each epoch.
    train_s: seconds in which it did its step.
    cpu_s: of the process.
  """

  stages: tuple[Stage, ...]
  wall_s: float
  num_steps: int
  num_files: int
  fetch_s: float
  train_s: float
  cpu_s: float


def profile(
  dataset: tf.data.Dataset,
  train_step_s: float = 0.0,
  *,
  waited: tf.Variable | None = None,
  min_seconds: float = 1.0,
  max_seconds: float = 20.0,
) -> Profile:
  """Watches epochs of a pipeline.

  Args:
    dataset: it is iterated until `min_seconds` have passed, to its end.
    train_step_s: how long the consumer sleeps after each batch.
    waited: as in `slow_storage.read`; what is added to it meanwhile is the
      wait of the stage that reads files.
    min_seconds: begins another epoch before.
    max_seconds: ends an epoch that is longer.

  Raises:
    DataError: tf.data keeps no model, because `options().autotune.enabled` is
      False.
  """
  waited_before = 0 if waited is None else int(waited)
  cpu_before, start = time.process_time(), time.perf_counter()
  totals = _Totals()
  while True:
    _watch_epoch(dataset, train_step_s, start + max_seconds, totals)
    if time.perf_counter() - start > min(min_seconds, max_seconds):
      break
  cpu_s = time.process_time() - cpu_before
  wait_s = 0.0
  if waited is not None:
    wait_s = (int(waited) - waited_before) / _MICROSECONDS
  return Profile(
    _by_name(totals.seen, totals.wall_s, wait_s),
    totals.wall_s,
    totals.num_steps,
    sum(seen.is_file for seen in totals.seen),
    totals.fetch_s,
    totals.train_s,
    cpu_s,
  )


@dataclasses.dataclass
class _Totals:
  """What the epochs that were watched add up to."""

  seen: list[model_watch.Seen] = dataclasses.field(default_factory=list)
  wall_s: float = 0.0
  num_steps: int = 0
  fetch_s: float = 0.0
  train_s: float = 0.0


def _watch_epoch(dataset, train_step_s, ends_at, totals: _Totals) -> None:
  iterator = iter(dataset)
  try:
    tf.data.experimental.get_model_proto(iterator)
  except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError) as e:
    raise errors.DataError(
      f'tf.data keeps no model of this pipeline ({e.message}); expected one '
      'whose options().autotune.enabled is not False'
    ) from e
  steps = 0
  start = time.perf_counter()
  with model_watch.Watch(iterator) as watch:
    while (asked := time.perf_counter()) < ends_at:
      # A look of the thread alone would miss an epoch of a few milliseconds.
      if steps < 2:
        watch.look()
      if next(iterator, None) is None:
        break
      got = time.perf_counter()
      # The first batch waits for files and buffers, once an epoch.
      totals.fetch_s += got - asked if steps else 0.0
      if train_step_s:
        time.sleep(train_step_s)
      totals.train_s += time.perf_counter() - got
      steps += 1
    totals.wall_s += time.perf_counter() - start
  totals.num_steps += steps
  totals.seen += watch.seen.values()


def _by_name(seen, wall_s, wait_s) -> tuple[Stage, ...]:
  groups: dict[tuple[str, bool], list[model_watch.Seen]] = {}
  for item in seen:
    if item.node.name != 'Root':
      key = (item.node.name, item.in_interleave)
      groups.setdefault(key, []).append(item)
  readers = [key for key in groups if _kind(key[0]) == 'extract']
  # Simulated storage waits where the files are read.
  waits_in = max(
    readers, key=lambda key: (key[0] == 'Sleep', key[1]), default=0
  )
  found = []
  for (name, in_interleave), items in groups.items():
    work = sum(item.node.processing_time for item in items) / _NANOSECONDS
    wait = wait_s if (name, in_interleave) == waits_in else 0.0
    threads = max(item.threads for item in items)
    looks = max(item.looks for item in items)
    found.append(
      Stage(
        name=name,
        kind=_kind(name),
        in_interleave=in_interleave,
        work_s=work,
        wait_s=wait,
        threads=threads,
        num_elements=sum(item.node.num_elements for item in items),
        num_nodes=len(items),
        mean_buffered=sum(item.buffered for item in items) / looks,
        utilisation=(work + wait) / (threads * wall_s),
      )
    )
  return tuple(sorted(found, key=lambda stage: -stage.utilisation))


def _kind(name: str) -> str:
  plain = name.removeprefix('Parallel').removeprefix('Legacy')
  for beginning, kind in _KINDS:
    if plain.startswith(beginning):
      return kind
  return 'other'
