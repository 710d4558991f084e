"""Feeds the replicas of several workers: each element once, in step.

There are two ways, chosen by the data set's auto-shard policy:

* AUTO and DATA: every worker has the same global batches and takes its rows.
  The parts of all replicas together are exactly one device's batch, and all
  workers see the same number of batches. Workers compare some of their batches.
* FILE and OFF, and `distribute_datasets_from_function`: each worker has its own
  data, and the amounts may differ. Before each step the workers tell each other
  whether they have data left. Workers without data continue without rows until
  all are done.
"""

import itertools
import zlib

import numpy as np
import tensorflow as tf

from tf_strategies import (
  _graph_errors,
  _keras_internal,
  _tf_internal,
  option_checks,
)
from tf_strategies.monitoring import input_watch
from tf_strategies.strategies.mirrored import host_input

_Policy = tf.data.experimental.AutoShardPolicy
_SAME_SEED = (
  'call tf.random.set_seed or keras.utils.set_random_seed with the same number on '
  'every worker before the data are shuffled'
)
_WHOLE_DATA = (
  'pass every worker the whole arrays, or the same data set, in one order: each '
  'takes its rows of every batch by itself. What NumPy or Python shuffles, shuffle '
  'after keras.utils.set_random_seed with the same number on every worker'
)
_OWN_DATA = (
  'Or, if each worker is to have data of its own, set '
  'options.experimental_distribute.auto_shard_policy to '
  'tf.data.experimental.AutoShardPolicy.OFF'
)


def distribute(extended, dataset, options) -> tf.data.Dataset:
  """Returns a data set of distributed values, given one of global batches."""
  host_input.check_dataset(dataset)
  _check_input_options(options)
  if host_input.is_distributed(dataset):
    return dataset
  if is_same_data(dataset):
    return _same_data(extended, dataset)
  if _policy_of(dataset) == _Policy.FILE:
    dataset = _tf_internal.shard_files(
      dataset, extended.communicator.world_size, extended.communicator.rank
    )
  # Each worker's share of a global batch: rows for its own replicas only.
  rows = _rows_of_replica(extended, dataset)
  return _own_data(extended, dataset.rebatch(rows))


def distribute_from_function(extended, dataset_fn, options) -> tf.data.Dataset:
  """Returns a data set of distributed values from per-replica batches."""
  _check_input_options(options)
  context = tf.distribute.InputContext(
    num_input_pipelines=extended.communicator.world_size,
    input_pipeline_id=extended.communicator.rank,
    num_replicas_in_sync=_num_replicas(extended),
  )
  return _own_data(extended, dataset_fn(context))


def _same_data(extended, dataset) -> tf.data.Dataset:
  """Returns a data set of this worker's rows of batches that all workers have.

  Workers compare some of the batches, and the number of steps.
  """
  steps = _keras_internal.num_steps(are_common=True)
  dataset_id = next(extended.datasets)

  def compare(index, *arrays):
    with _graph_errors.typed():
      check_same(
        extended.communicator,
        f'batch/{dataset_id}/{index}',
        f'batch {index} of a data set',
        arrays,
        steps=steps,
      )
    return np.int64(0)

  def with_parts(index, batch):
    first = next(t for t in tf.nest.flatten(batch) if t is not None)
    rows = tf.cast(host_input.num_rows(first), tf.int32)
    count = _num_replicas(extended)
    # Of every replica of every worker, by replica id.
    _, all_rows = host_input.share(rows, tf.range(count), count)
    mine = host_input.split(batch, count, extended.places)
    return index, batch, (mine, all_rows)

  def checked(index, batch, parts):
    leaves = tf.nest.flatten(batch, expand_composites=True)
    leaves = [leaf for leaf in leaves if leaf is not None]
    # Of batches 0, 1, 2, 4, 8, ...: most steps do not call Python.
    is_same = tf.cond(
      tf.equal(tf.bitwise.bitwise_and(index, index - 1), 0),
      lambda: tf.numpy_function(compare, [index, *leaves], tf.int64),
      lambda: tf.constant(0, tf.int64),
    )
    with tf.control_dependencies([is_same]):
      batches, all_rows = input_watch.copied(parts)
    return _with_rows(extended, batches, all_rows)

  dataset = dataset.enumerate().map(with_parts).prefetch(1).map(checked)
  return host_input.HostDataset(dataset.with_options(_on_demand()))


def _with_rows(extended, batches, all_rows):
  """Returns the batches of the replicas. A single replica gets plain tensors."""
  if extended.is_one_device:
    return batches[0]
  return host_input.per_replica(batches, all_rows)


def _rows_of_replica(extended, dataset) -> int:
  """Returns the number of rows of a global batch for each replica."""
  size = int(_tf_internal.compute_batch_size(dataset))  # -1: unknown.
  total = _num_replicas(extended)
  option_checks.check(
    size > 0 and size % total == 0,
    f'batches of {size if size > 0 else "unknown size"} with AutoShardPolicy.FILE or OFF '
    f'and {total} replicas',
    'a batch size that divides by the number of replicas',
    'call dataset.batch with a multiple of strategy.num_replicas_in_sync',
  )
  return size // total


def _own_data(extended, dataset):
  """Returns a data set of distributed values, given one of per-replica batches.

  It ends when all workers have run out of data.
  """
  num_local = len(extended.worker_devices)
  steps = _keras_internal.num_steps(are_common=False)
  dataset_id = next(extended.datasets)

  def counted(*element):
    """Returns that there is data, its number of rows, and the data."""
    batch = host_input.unwrap(dataset, element)
    batched = [x for x in tf.nest.flatten(batch) if x.shape.rank != 0]
    # An element without rows counts as one.
    rows = host_input.num_rows(batched[0]) if batched else 1
    return True, tf.cast(rows, tf.int32), batch

  def group(*window):
    elements = tf.data.Dataset.zip(window)
    return tf.data.Dataset.zip(
      tuple(elements.skip(i).take(1) for i in range(num_local))
    )

  def share_rows(index, has_data, rows):
    tag = f'rows/{dataset_id}/{index}'
    mine = [bool(has_data), rows.tolist(), steps]
    with _graph_errors.typed():
      answers = extended.communicator.exchange(tag, mine)
      have, counts, limits = zip(*answers, strict=True)
      _check_steps(extended.communicator, limits)
    return np.bool_(any(have)), np.int32(list(itertools.chain(*counts)))

  def agree(index, elements):
    (has_data, *_), rows, batches = zip(*elements, strict=True)
    left, all_rows = tf.numpy_function(
      share_rows, [index, has_data, tf.stack(rows)], [tf.bool, tf.int32]
    )
    return (
      tf.ensure_shape(left, []),
      tf.ensure_shape(all_rows, [_num_replicas(extended)]),
      batches,
    )

  elements = dataset.map(counted)
  spec = tf.nest.map_structure(
    _tf_internal.with_any_rows, elements.element_spec
  )
  # Without data and rows: numbers are False and zero.
  nothing = tf.data.Dataset.from_tensors(_tf_internal.empty_batch(spec))
  elements = elements.concatenate(nothing.repeat())
  if num_local == 1:
    grouped = elements.map(lambda *element: (element,))
  else:
    grouped = elements.window(num_local).flat_map(group)

  def epoch(_):
    return (
      grouped.prefetch(1)
      .enumerate()
      .map(agree)
      .take_while(lambda left, all_rows, batches: left)
      .map(lambda left, rows, batches: _with_rows(extended, batches, rows))
    )

  # Outside of `flat_map`, TensorFlow would run the last of these ahead of the step.
  # `flat_map` does not pass on the options of its argument.
  distributed = tf.data.Dataset.range(1).flat_map(epoch)
  distributed = distributed.with_options(dataset.options())
  return host_input.HostDataset(distributed.with_options(_on_demand()))


def _num_replicas(extended) -> int:
  # The communicator of an elastic worker joins the others first.
  return len(extended.worker_devices) * extended.communicator.world_size


def is_same_data(dataset: tf.data.Dataset) -> bool:
  """Returns whether all workers read the same batches of a data set."""
  return not host_input.is_distributed(dataset) and _policy_of(dataset) not in (
    _Policy.FILE,
    _Policy.OFF,
  )


def check_same(
  communicator, tag: str, what: str, arrays, fix: str = '', steps=None
) -> None:
  """Raises CollectiveMismatchError unless all workers have a batch of such arrays."""
  answers = communicator.exchange(tag, [_number_of(arrays), steps])
  if all(answer == answers[0] for answer in answers):
    return
  # Sent to all workers, so that the error message can be more precise.
  mine = _keras_internal.running_call(), _tf_internal.global_seed()
  told = communicator.exchange(f'{tag}/more', mine)
  calls, seeds = zip(*told, strict=True)
  communicator.check_same(
    calls,
    'the method of a model that is running',
    'call the same methods on all workers, outside of any `if` on the rank',
  )
  numbers, limits = zip(*answers, strict=True)
  _check_steps(communicator, limits)
  advice = _WHOLE_DATA if len(set(seeds)) == 1 else _SAME_SEED
  communicator.check_same(
    numbers,
    what,
    fix or f'{advice}. {_OWN_DATA}',
  )


def _check_steps(communicator, limits) -> None:
  """Raises CollectiveMismatchError unless all workers take as many steps."""
  communicator.check_same(
    limits,
    'the number of steps (steps, steps_per_epoch or validation_steps, or the '
    'number of batches)',
    'pass the same number, or data of the same length, on all workers',
  )


def _policy_of(dataset):
  return dataset.options().experimental_distribute.auto_shard_policy


def _check_input_options(options):
  mode = getattr(options, 'experimental_replication_mode', None)
  option_checks.check(
    mode != tf.distribute.InputReplicationMode.PER_REPLICA,
    'InputOptions(experimental_replication_mode=PER_REPLICA)',
    'InputReplicationMode.PER_WORKER',
    'leave it out: one pipeline feeds the replicas of a worker',
  )


def _on_demand() -> tf.data.Options:
  """Returns options with which nothing runs before the step that asks for it.

  A pipeline that talks to the other workers before its step could wait for workers that
  have already given up theirs.
  """
  options = tf.data.Options()
  options.experimental_optimization.inject_prefetch = False
  return options


def _number_of(arrays) -> int:
  """Returns a number for a batch, by its shapes and first and last values."""
  value = 0
  for array in map(np.asarray, arrays):
    flat = array.ravel()
    sample = np.concatenate([flat[:256], flat[-256:]]).tolist()
    value = zlib.crc32(repr([array.shape, sample]).encode(), value)
  return value
