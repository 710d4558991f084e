"""How much each stage of a running tf.data pipeline works.

tf.data keeps a model of every iterator for its tuner, and
`tf.data.experimental.get_model_proto(iterator)` returns it; what follows is the
same in TensorFlow 2.18 and 2.21. A node of the model is one dataset of the
pipeline after TensorFlow's rewrites (`Map` and `BatchV2` may have become
`MapAndBatch`), named as its op: `TFRecord`, `ParallelInterleaveV4`,
`ParallelMapV2`, `Prefetch`.

- `processing_time`: nanoseconds in the node itself, without its inputs, summed
  over all threads that ran it. Of a map it is the time of the ops of its
  function, each op counted on its own. Reading a file, and sleeping in a
  `numpy_function`, count as time of the node: it is busy, not computing.
  Waiting for an input or for room in a buffer does not count.
- `num_elements`: how many came out.
- `parameters`: of a parallel node `parallelism`, whose `state_value` is how many
  calls may run at this moment. The tuner changes it.
- A file that an interleave opens is a node too, with an id of its own, and gone
  from the model as soon as it has been read. So a thread reads the proto every few
  milliseconds, and what was last seen of every id is added up by name.

Hence `work_s / wall_s` of a stage is the mean number of threads that it kept
busy, and `utilisation`, the same over the threads that it may use, tells which
stage the others wait for: at 1 it never waits itself.

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
import threading
import time

import tensorflow as tf

from tf_strategies import errors

_NANOSECONDS = 1e9
# Short beside the files of a benchmark, long beside the look itself (0.1 ms).
_LOOK_SECONDS = 0.004
_JOIN_SECONDS = 10.0

# The beginnings of a node's name, without `Parallel`.
_KINDS = {
  'map': ('Map', 'Filter', 'Scan'),
  'extract': (
    *('Interleave', 'FlatMap', 'Generator', 'TFRecord', 'TextLine'),
    *('FixedLength', 'Tensor', 'FromTensor', 'Range'),
  ),
  'batch': ('Batch', 'PaddedBatch', 'Unbatch'),
  'shuffle': ('Shuffle',),
  'cache': ('Cache', 'MemoryCache'),
  'prefetch': ('Prefetch',),
}


@dataclasses.dataclass(frozen=True)
class Stage:
  """What all nodes of a name did while a pipeline was watched.

  Attributes:
    name: of its nodes, as tf.data names them.
    kind: 'extract', 'map', 'batch', 'shuffle', 'cache', 'prefetch' or 'other'.
    work_s: `processing_time` of all nodes of this name, in seconds.
    threads: how many calls may run at once, as the tuner left it.
    num_elements: how many came out.
    utilisation: work_s / (threads * wall_s).
  """

  name: str
  kind: str
  work_s: float
  threads: int
  num_elements: int
  utilisation: float


@dataclasses.dataclass
class Profile:
  """A pipeline that was watched for an epoch or more.

  Attributes:
    stages: the busiest first.
    wall_s: how long, without making iterators.
    num_steps: batches that came.
    fetch_s: seconds in which the consumer waited for batches, without the
      first of each epoch.
    train_s: seconds in which it did its step.
  """

  stages: tuple[Stage, ...] = ()
  wall_s: float = 0.0
  num_steps: int = 0
  fetch_s: float = 0.0
  train_s: float = 0.0


def profile(
  dataset: tf.data.Dataset,
  train_step_s: float = 0.0,
  *,
  min_seconds: float = 1.0,
  max_seconds: float = 20.0,
) -> Profile:
  """Watches epochs of a pipeline.

  Args:
    dataset: it is iterated until `min_seconds` have passed, to its end.
    train_step_s: how long the consumer sleeps after each batch.
    min_seconds: begins another epoch before.
    max_seconds: ends an epoch that is longer.

  Raises:
    DataError: tf.data keeps no model, because `options().autotune.enabled` is
      False.
  """
  start = time.perf_counter()
  found, watches = Profile(), []
  while True:
    watches.append(
      _watch_epoch(dataset, train_step_s, start + max_seconds, found)
    )
    if time.perf_counter() - start > min(min_seconds, max_seconds):
      break
  found.stages = _by_name(watches, found.wall_s)
  return found


class _Watch:
  """Looks at the model of an iterator, again and again, on a thread.

  Attributes:
    nodes: the last that was seen of each node, by its id.
    threads: the most calls that a node could run at once, by its id.
  """

  def __init__(self, iterator):
    self.nodes, self.threads = {}, {}
    self._iterator = iterator
    self._lock = threading.Lock()
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name='tf_data_model_watch', daemon=True
    )

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *unused):
    self._stop.set()
    self._thread.join(_JOIN_SECONDS)
    # It must not look at an iterator that is being deleted.
    self._iterator = None

  def _run(self) -> None:
    while not self._stop.wait(_LOOK_SECONDS):
      self.look()

  def look(self) -> None:
    """Remembers what each node has done so far."""
    model = tf.data.experimental.get_model_proto(self._iterator)
    with self._lock:
      if model.output in model.nodes:
        self._visit(model, model.nodes[model.output], None)

  def _visit(self, model, node, interleave) -> None:
    own = [
      int(p.state_value) for p in node.parameters if p.name == 'parallelism'
    ]
    threads = max(own, default=0) or interleave or 1
    self.threads[node.id] = max(threads, self.threads.get(node.id, 1))
    seen = self.nodes.setdefault(node.id, node)
    # A node that is torn down while the model is read may have lost its time.
    if node.processing_time >= seen.processing_time:
      self.nodes[node.id] = node
    for position, key in enumerate(node.inputs):
      if key in model.nodes:
        # The first input names the files, each other one is a file.
        is_file = 'Interleave' in node.name and position > 0
        self._visit(model, model.nodes[key], threads if is_file else interleave)


def _watch_epoch(dataset, train_step_s, ends_at, found: Profile) -> _Watch:
  """Runs an epoch, and adds its times to `found`."""
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
  with _Watch(iterator) as watch:
    while (asked := time.perf_counter()) < ends_at:
      # A look of the thread alone would miss an epoch of a few milliseconds.
      if steps < 2:
        watch.look()
      if next(iterator, None) is None:
        break
      got = time.perf_counter()
      # The first batch waits for files and buffers, once an epoch.
      found.fetch_s += got - asked if steps else 0.0
      if train_step_s:
        time.sleep(train_step_s)
      found.train_s += time.perf_counter() - got
      steps += 1
    found.wall_s += time.perf_counter() - start
  found.num_steps += steps
  return watch


def _by_name(watches, wall_s) -> tuple[Stage, ...]:
  groups: dict[str, list] = {}
  for watch in watches:
    for number, node in watch.nodes.items():
      if node.name != 'Root':
        group = groups.setdefault(node.name, [])
        group.append((node, watch.threads[number]))
  stages = []
  for name, members in groups.items():
    work = sum(node.processing_time for node, _ in members) / _NANOSECONDS
    threads = max(threads for _, threads in members)
    elements = sum(node.num_elements for node, _ in members)
    stages.append(
      Stage(
        *(name, _kind(name), work, threads, elements),
        utilisation=work / (threads * wall_s),
      )
    )
  return tuple(sorted(stages, key=lambda stage: -stage.utilisation))


def _kind(name: str) -> str:
  plain = name.removeprefix('Parallel').removeprefix('Legacy')
  for kind, beginnings in _KINDS.items():
    if plain.startswith(beginnings):
      return kind
  return 'other'
