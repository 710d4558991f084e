"""A chief that trains tables whose rows record their steps, and that can be held.

A test holds a task at an exact point with a file of the name of the point in a
directory. A task that reaches the point writes a file `<point>.reached`
repeatedly, and waits until the first file is deleted. Meanwhile the test kills
a task.

Workers pass the points `lookup` and `update` of a step (with 'sync', servers
pass `update`). With `holds_writes`, servers 0 and 1 pass `write 0` and `write
1` before they write rows of the partitioned table. The chief passes the points
in `_POINTS` while it saves or loads. With `holds_writes` there are also `loop
0` and `loop 1`, before rows of the dynamic table are computed, and `rows 0` and
`rows 1`, before they are written. The files of the latter are pipes while they
are held (`rows_held`). While `lock` is held, no task writes rows of the dynamic table on
server 1.
"""

import contextlib
import importlib
import json
import os
import pathlib
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import parameter_servers
from tests.integration import parameter_server_programs as programs
from tf_strategies import _tf_internal
from tf_strategies.keras.tables import dynamic_embedding, row_table
from tf_strategies.strategies.parameter_server import partitioned, variables

WIDTH = 64
# Large enough that the partitioned table is saved in blocks.
ROWS = 8192
# Number of steps after which rows and ids repeat.
HOT = 7
_HELD_SECONDS = 60.0
# Point: (module in `tf_strategies`, owner and name of the function that the
# chief calls there, condition for counting).
_POINTS = {
  # Before rows of server 1 are read; after all rows, without a manifest.
  'rows': (
    'strategies.parameter_server.variables',
    'ServerVariable',
    'rows_directly',
    lambda variable, *_: tf.executing_eagerly() and variable.server == 1,
  ),
  'manifest': ('checkpoint.checkpointer', '', '_digest', None),
  # All files are written but not renamed yet; then they are renamed.
  'rename': ('checkpoint.checkpointer', 'os', 'rename', None),
  'named': (
    'strategies.parameter_server.recovery',
    'Recovery',
    '_note_newest',
    None,
  ),
  # Between the ids and rows of a dynamic table, and its slots.
  'columns': (
    'strategies.parameter_server.partitioned',
    'ServerShard',
    'stored_of',
    None,
  ),
  'load': ('checkpoint.checkpointer', 'StoredArrays', 'rows', None),
  'load columns': (
    'strategies.parameter_server.partitioned',
    'ServerShard',
    'store',
    None,
  ),
  # Before it connects to the cluster in its current state.
  'connect': ('_tf_internal', '', 'connect_again', None),
  # All variables are restored, and no step has begun.
  'restored': (
    'strategies.parameter_server.recovery',
    'Recovery',
    '_begun_since',
    None,
  ),
}


def ids_of_steps(steps: int) -> np.ndarray:
  """Returns the rows [2 * 2, 2] that each step looks up.

  Column 0 contains rows of the partitioned table, column 1 ids of the dynamic
  table. The first two examples belong to this step alone, the others to every
  seventh step. The first and third are on server 0, the others on server 1.
  """
  count = steps + HOT
  found = np.arange(8 * count, dtype=np.int64) * (2**40 + 7) - 2**50
  owner = dynamic_embedding.owner(tf.constant(found), 2).numpy()
  ids = np.empty([steps, 4, 2], np.int64)
  for server in (0, 1):
    dynamic = found[owner == server][:count]
    first = server * ROWS // 2
    for step in range(steps):
      hot = steps + step % HOT
      ids[step, server] = first + step, dynamic[step]
      ids[step, 2 + server] = first + hot, dynamic[hot]
  return ids


def _hold(directory: str, point: str, turn, held):
  """Returns the tensor `held` in a graph once the point is not held.

  `turn` is any number. The end of the worker's call ends the wait.
  """

  def is_held(turn, held):
    del held
    # The path depends on `turn`, or the files would be matched only once.
    nothing = tf.strings.substr(tf.strings.as_string(turn), 0, 0)
    path = tf.strings.join([f'{directory}/{point}', nothing])
    return tf.size(tf.io.matching_files(path)) > 0

  def wait(turn, held):
    reached = tf.io.write_file(f'{directory}/{point}.reached', '')
    with tf.control_dependencies([reached]):
      # `pause` returns a loop value. Otherwise later ops could run before it.
      return turn + 1, programs.pause(held, 20)

  return tf.while_loop(is_held, wait, [turn, held], parallel_iterations=1)[1]


def hold_here(directory: str, point: str) -> None:
  """Waits in this process while the point is held."""
  path = pathlib.Path(directory, point)
  ends_at = time.monotonic() + _HELD_SECONDS
  while path.exists():
    pathlib.Path(f'{path}.reached').touch()
    if time.monotonic() > ends_at:
      raise TimeoutError(f'held at {point}')
    time.sleep(0.01)


@contextlib.contextmanager
def rows_held(path: pathlib.Path) -> Iterator[None]:
  """Holds `rows 0` or `rows 1`, even if the worker dies."""
  pipe = path.with_name('pipe')
  os.mkfifo(pipe)
  pipe.rename(path)
  yield
  path.rename(pipe)
  # Returns when the held task has opened and closed the pipe.
  assert pipe.read_bytes() == b''
  pipe.unlink()


def _can_be_held(directory: str) -> None:
  """Makes this process stop at the points that a test holds."""

  for point, (module, owner, name, counts) in _POINTS.items():
    found = importlib.import_module(f'tf_strategies.{module}')
    for part in filter(None, [owner]):
      found = getattr(found, part)
    real = getattr(found, name)

    def call(*args, _point=point, _real=real, _counts=counts, **options):
      if _counts is None or _counts(*args):
        hold_here(directory, _point)
      return _real(*args, **options)

    setattr(found, name, call)


def _writes_can_be_held(directory: str) -> None:
  """Makes servers stop before they write rows.

  A task that reaches rows of the dynamic table writes a file
  `began-<server>-<id>`.
  """
  real = variables.ServerVariable.scatter_add

  def scatter_add(self, slices, *args, **options):
    if tuple(self.shape[1:]) == (WIDTH,):
      with tf.device(self.device):
        turn = tf.size(slices.indices, tf.int64)
        values = _hold(directory, f'write {self.server}', turn, slices.values)
      slices = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
    return real(self, slices, *args, **options)

  real_lookup = partitioned.ServerShard._lookup
  real_store = partitioned.ServerShard.store

  def lookup(self, column, ids):
    if column != row_table.ROWS:  # The state of an optimizer: in updates only.
      # An initializer of rows may also contain a loop.
      ids = _hold(directory, f'loop {self.server}', tf.reduce_sum(ids), ids)
    return real_lookup(self, column, ids)

  def store(self, ids, values):
    if tf.executing_eagerly():
      return real_store(self, ids, values)
    path = f'{directory}/began-{self.server}-'
    number = tf.strings.as_string(tf.reduce_sum(ids))
    began = tf.io.write_file(tf.strings.join([path, number]), '')
    with tf.control_dependencies([began]):
      # Opening a pipe waits for a reader, even if the call is cancelled.
      passed = tf.io.write_file(f'{directory}/rows {self.server}', '')
    with tf.control_dependencies([passed]):
      ids = tf.identity(ids)
    return real_store(self, ids, values)

  variables.ServerVariable.scatter_add = scatter_add
  partitioned.ServerShard._lookup = lookup
  partitioned.ServerShard.store = store


def _answer(directory: str, parts, pool) -> None:
  """Answers in a thread how many updates the rows on each server have.

  The file `away` exists while a worker is lost.
  """
  question = pathlib.Path(directory, 'peek')
  while True:
    time.sleep(0.02)
    away = pathlib.Path(directory, 'away')
    away.touch() if pool.lost else away.unlink(missing_ok=True)
    if question.exists():
      found = []
      for part in parts[: int(question.read_text())]:
        with _tf_internal.own_executor(), tf.device(part.device):
          found.append(int(part.read_directly().numpy()[:, 0].sum()))
      question.unlink()
      programs.write_number(f'{question}ed', ' '.join(map(str, found)))


def _lock(directory: str, shard) -> None:
  """Keeps the lock of a dynamic table's rows in a thread while a test holds it."""
  while True:
    time.sleep(0.02)
    if pathlib.Path(directory, 'lock').exists():
      with _tf_internal.own_executor(), tf.device(shard.device):
        lock = tf.raw_ops.MutexLock(mutex=shard._mutex)
        hold_here(directory, 'lock')
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        del lock


def _make(directory: str, options: dict[str, Any]):
  """Returns a strategy, layers with zero rows, an optimizer, and a step on ids."""
  servers = len(json.loads(os.environ['TF_CONFIG'])['cluster']['ps'])
  strategy = tfs.ParameterServerStrategy(
    checkpoint_dir=os.path.join(directory, 'checkpoints'),
    recovery_timeout=120.0,
    variable_partitioner=lambda shape, dtype: (
      [servers if shape[0] == ROWS else 1] + [1] * (len(shape) - 1)
    ),
    **options,
  )

  looked_up = []

  class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """Returns 1 when the point `update` is not held."""

    def __call__(self, step):
      turn = keras.ops.cast(step, 'int64')
      here = tf.compat.v1.get_default_graph()
      rows = [t for t in looked_up if getattr(t, 'graph', None) is here]
      with tf.control_dependencies(rows):
        one = tf.identity(tf.constant(1.0))
      return _hold(directory, 'update', turn, one)

  with strategy.scope():
    static = keras.layers.Embedding(ROWS, WIDTH, 'zeros')
    dynamic = tfs.keras.DynamicEmbedding(WIDTH, 'zeros')
    for layer in (static, dynamic):
      layer.build([None])
    weights = static.trainable_variables + dynamic.trainable_variables
    # Each gradient is 1, so the slot of a row counts the steps that used it.
    optimizer = keras.optimizers.Adagrad(Rate(), initial_accumulator_value=0.0)
    optimizer.build(weights)

  def update(ids):
    with tf.GradientTape() as tape:
      rows = static(ids[:, 0]), dynamic(ids[:, 1])
      # Gradients of 1, which depend on the rows.
      looked_up[:] = are_there = [tf.cast(r > -1.0, tf.float32) for r in rows]
      sums = [
        tf.reduce_sum(a * r) for a, r in zip(are_there, rows, strict=True)
      ]
      loss = -tf.add_n(sums)
    optimizer.apply(tape.gradient(loss, weights), weights)
    return loss

  @tf.function
  def step(ids):
    # Workers share the rows: nothing mixes them.
    held = _hold(directory, 'lookup', 0, tf.constant(1.0))
    with tf.control_dependencies([held]):
      return update(tf.identity(ids))

  return strategy, static, dynamic, optimizer, step


def train(
  directory: str,
  steps: int,
  options: dict[str, Any],
  holds_writes: bool = False,
) -> dict[str, Any]:
  """Runs the remaining steps, and returns the state as `_found` does.

  Writes the number of begun steps to `<directory>/progress`.
  """
  _can_be_held(directory)
  if holds_writes:
    _writes_can_be_held(directory)
  strategy, static, dynamic, optimizer, step = _make(directory, options)
  run = strategy.step(step, [optimizer])
  ids = ids_of_steps(steps)
  with strategy.scope():
    model = keras.Model()
  model.tables, model.built = [static, dynamic], True
  saved = tfs.Run(strategy.options.checkpoint_dir, model, optimizer)
  began = saved.restore().step
  slot = _slot_of_parts(optimizer)
  threading.Thread(
    target=_answer, args=(directory, slot.parts, strategy._pool), daemon=True
  ).start()
  shard = dynamic.trainable_variables[0].row_table.shards[-1]
  threading.Thread(target=_lock, args=(directory, shard), daemon=True).start()
  with saved:
    for i in range(began, steps):
      run(ids[i])
      programs.write_number(os.path.join(directory, 'progress'), i + 1)
      time.sleep(0.005)
      saved.exit_if_preempted(0, i + 1)
  strategy.save()
  programs.check_shared(strategy)
  found = _found(static, dynamic, optimizer, ids)
  found |= {'began': began, 'recoveries': strategy.report()['recoveries']}
  strategy.close()
  return found


def _slot_of_parts(optimizer):
  """Returns the optimizer's state of the partitioned table."""
  (slot,) = [v for v in optimizer.variables if tuple(v.shape) == (ROWS, WIDTH)]
  return slot.value


def _found(static, dynamic, optimizer, ids) -> dict[str, Any]:
  """Returns all rows of the steps, with slots and counts, by table.

  The arrays are [steps, 4] like `ids`. All numbers of a row must be equal, so
  each row is represented by one.
  """
  table = dynamic.trainable_variables[0].row_table
  flat = ids[..., 1].reshape(-1)
  rows = table.stored(flat)
  accumulators = table.stored(flat, table.slots[0])
  usage = dynamic.usage()
  uses = dict(zip(usage['ids'].tolist(), usage['uses'].tolist(), strict=True))
  whole = {
    'static': (
      static.embeddings.value.numpy(),
      _slot_of_parts(optimizer).numpy(),
    ),
    'dynamic': (rows[:, :WIDTH], accumulators[:, :WIDTH]),
  }
  found = {}
  for name, values in whole.items():
    if name == 'static':
      values = [v[ids[..., 0].reshape(-1)] for v in values]
    is_even = all((v == v[:, :1]).all() for v in values)
    weights, counts = (v[:, 0].reshape(ids.shape[:2]) for v in values)
    found[name] = {'weights': weights, 'counts': counts, 'is_even': is_even}
  # Rows that no step uses must not change.
  others = np.delete(whole['static'][0], ids[..., 0].reshape(-1), 0)
  found['others'] = float(np.abs(others).max()), len(uses)
  found['uses'] = np.array([uses.get(i, 0) for i in flat.tolist()])
  found['uses'] = found['uses'].reshape(ids.shape[:2])
  found['by_shard'] = dynamic.report()['by_shard']
  found['iterations'] = int(optimizer.iterations.numpy())
  return found


def exact(steps: int) -> dict[str, Any]:
  """Returns the result of `train` if no task dies."""
  own = np.ones([steps, 2])
  shared = np.array(
    [[len(range(i % HOT, steps, HOT))] * 2 for i in range(steps)]
  )
  counts = np.concatenate([own, shared], 1)
  sums = np.cumsum(1 / np.sqrt(np.arange(steps) + 1.0))
  table = {'counts': counts, 'weights': sums[counts.astype(int) - 1]}
  return {
    'static': {**table, 'is_even': True},
    'dynamic': {**table, 'is_even': True},
    'uses': counts,
    'others': (0.0, 2 * steps + 2 * HOT),
    'by_shard': [steps + HOT] * 2,
    'iterations': steps,
    'recoveries': [],
  }


def serve(cluster: dict[str, Any], job: str, index: int) -> None:
  """Runs a task that is killed in the middle of a write by a file size limit."""

  # Python ignores this signal by default.
  signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  parameter_servers.serve_task(cluster, job, index)


def main(directory: str, steps: int, options: dict[str, Any]) -> None:
  """Runs `train` as a task of a launcher, and writes the chief's result to a file."""

  found = tfs.cluster.run_task(lambda: train(directory, steps, options))
  if found is not None:
    pathlib.Path(directory, 'found').write_bytes(pickle.dumps(found))


if __name__ == '__main__':
  main(*json.loads(sys.argv[1]))
