"""Workers see each element exactly once, in step, whatever each of them reads."""

import collections
import functools
import os
import traceback

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tiers, virtual_devices
from tf_strategies import _tf_internal

virtual_devices.configure()
_DEADLINE_SECONDS = 240
_Policy = tf.data.experimental.AutoShardPolicy

# (workers, local devices)
_WORLDS = ((2, 1), (2, 2), (3, 1))
_TELLING = (2, 2)
_MARKS = [tiers.unmarked if w == _TELLING else tiers.soak for w in _WORLDS]
_EVERY = tuple(
  mark(f'{w}x{d}', w, d) for mark, (w, d) in zip(_MARKS, _WORLDS, strict=True)
)
_EVERY_WORLD = [
  mark({'workers': w, 'devices': d})
  for mark, (w, d) in zip(_MARKS, _WORLDS, strict=True)
]

# Rows, global batch and policy: even, uneven, fewer rows than replicas at the end.
_SAME_DATA = (
  (24, 12, _Policy.AUTO),
  (23, 12, _Policy.DATA),
  (13, 12, _Policy.AUTO),
  (10, 10, _Policy.AUTO),
)
_FILE_ROWS = (3, 0, 11, 1, 5, 2)


def _with_policy(dataset, policy):
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = policy
  return dataset.with_options(options)


def _write_files(directory):
  """Writes TFRecord files with different records, numbered 100 apart."""
  for i, rows in enumerate(_FILE_ROWS):
    with tf.io.TFRecordWriter(_file(directory, i)) as writer:
      for row in range(rows):
        writer.write(str(100 * i + row).encode())


def _file(directory, index):
  return os.path.join(directory, f'{index}.tfrecord')


# Programs of the workers. Each returns one entry for each batch: the rows of
# each local replica, and the batch's values for all replicas.


def _consume(strategy, dataset):
  seen = []
  for batch in dataset:
    parts = strategy.experimental_local_results(batch)
    seen.append(([p.numpy().tolist() for p in parts], _all_rows(batch)))
  return seen


def _all_rows(batch):
  return batch.all_rows.numpy().tolist()


def _same_data(strategy, rows, global_batch, policy):
  dataset = _with_policy(
    tf.data.Dataset.range(rows).batch(global_batch), policy
  )
  distributed = strategy.experimental_distribute_dataset(dataset)
  return [_consume(strategy, distributed) for _ in range(2)]


def _files(strategy, directory):
  names = [_file(directory, i) for i in range(len(_FILE_ROWS))]
  dataset = tf.data.TFRecordDataset(names).map(
    lambda text: tf.strings.to_number(text, tf.int64)
  )
  dataset = _with_policy(dataset.batch(12), _Policy.FILE)
  distributed = strategy.experimental_distribute_dataset(dataset)
  return [_consume(strategy, distributed) for _ in range(2)]


def _own_rows(rank):
  return 100 * rank + np.arange(5 + 9 * rank)


def _own_data(strategy):
  dataset = tf.data.Dataset.from_tensor_slices(_own_rows(strategy.rank))
  dataset = _with_policy(dataset.batch(12), _Policy.OFF)
  distributed = strategy.experimental_distribute_dataset(dataset)
  return [_consume(strategy, distributed) for _ in range(2)]


def _from_function(strategy):
  def make(context):
    assert context.num_input_pipelines == strategy.num_workers
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
    rows = _own_rows(context.input_pipeline_id)
    return tf.data.Dataset.from_tensor_slices(rows).batch(2)

  distributed = strategy.distribute_datasets_from_function(make)
  return [_consume(strategy, distributed) for _ in range(2)]


def _unseeded_shuffle(strategy):
  dataset = tf.data.Dataset.range(40).shuffle(40).batch(12)
  distributed = strategy.experimental_distribute_dataset(dataset)
  return [_consume(strategy, distributed) for _ in range(2)]


def _failure(strategy, dataset):
  distributed = strategy.experimental_distribute_dataset(dataset)
  try:
    seen = _consume(strategy, distributed)
  except tfs.errors.CollectiveMismatchError as e:
    return str(e), e.ranks
  return f'no error, but {seen}', ()


def _other_data(strategy):
  return _failure(strategy, tf.data.Dataset.range(strategy.rank, 30).batch(12))


def _other_seed(strategy):
  """Runs a program that wrongly seeds each worker with its rank."""
  before = _tf_internal.global_seed()
  tf.random.set_seed(strategy.rank)
  result = _failure(strategy, tf.data.Dataset.range(300).shuffle(300).batch(60))
  tf.random.set_seed(before)
  return result


def _given_up(strategy):
  """Abandons some iterators in the middle, then finishes one."""
  datasets = [
    tf.data.Dataset.range(1000).batch(12),
    _with_policy(
      tf.data.Dataset.range(500 * (1 + strategy.rank)).batch(12), _Policy.OFF
    ),
  ]
  for dataset in datasets:
    distributed = strategy.experimental_distribute_dataset(dataset)
    for turn in range(6):
      for i, _ in enumerate(distributed):
        if i == turn:
          break
  function = lambda _: tf.data.Dataset.range(300).batch(2)  # noqa: E731
  for turn in range(3):
    iterator = iter(strategy.distribute_datasets_from_function(function))
    for _ in range(turn + 1):
      next(iterator)
    del iterator
  return _own_data(strategy)


class _Sum(keras.losses.Loss):
  def call(self, y_true, y_pred):
    return y_pred[:, 0] * y_true[:, 0]


def _counting_model(strategy, rows):
  """Returns a model whose weights count how often it trained on each row."""
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.layers.Input([1], dtype='int32'),
        keras.layers.Embedding(rows, 1, embeddings_initializer='zeros'),
        keras.layers.Flatten(),
      ]
    )
    model.compile(keras.optimizers.SGD(1.0), _Sum(reduction='sum'))
  return model


def _keras_shuffle(strategy):
  model = _counting_model(strategy, 48)
  x, y = np.arange(48)[:, None], np.full([48, 1], -1.0, np.float32)
  counts = []
  for _ in range(2):
    model.fit(x, y, batch_size=12, epochs=1, shuffle=True, verbose=0)
    counts.append(model.get_weights()[0][:, 0].tolist())
  return counts


def _keras_own_data(strategy):
  """Returns how often two epochs of `fit` trained on each row of any worker."""
  dataset = tf.data.Dataset.from_tensor_slices(_own_rows(strategy.rank))
  dataset = dataset.map(lambda x: (x[None], tf.constant([-1.0])))
  dataset = _with_policy(dataset.batch(12), _Policy.OFF)
  model = _counting_model(strategy, 100 * strategy.num_workers)
  model.fit(dataset, epochs=2, verbose=0)
  return model.get_weights()[0][:, 0].tolist()


def _programs(directory):
  programs = {
    'unseeded_shuffle': _unseeded_shuffle,
    'keras_shuffle': _keras_shuffle,
    'keras_own_data': _keras_own_data,
    'file': lambda s: _files(s, directory),
    'off': _own_data,
    'from_function': _from_function,
    'other_data': _other_data,
    'other_seed': _other_seed,
    'given_up': _given_up,
  }
  for rows, size, policy in _SAME_DATA:
    programs[f'{policy.name}_{rows}'] = functools.partial(
      _same_data, rows=rows, global_batch=size, policy=policy
    )
  return programs


def _work(rank, devices, directory):
  strategy = tfs.MultiWorkerRingStrategy(devices=virtual_devices.names(devices))
  assert strategy.rank == rank
  results = {}
  for name, program in _programs(directory).items():
    try:
      results[name] = program(strategy)
    except Exception:
      results[name] = traceback.format_exc()
      break  # The other workers may be at any point.
  strategy.close()
  return results


# World: the results of `_work` on each worker.
_RESULTS = {}


class InputTest(tf.test.TestCase, parameterized.TestCase):
  """Starts the workers once for each world. The tests read their results."""

  def results(self, workers, devices, name):
    """Returns each worker's result for one program."""
    if (workers, devices) not in _RESULTS:
      directory = self.create_tempdir().full_path
      _write_files(directory)
      _RESULTS[workers, devices] = processes.run_workers(
        _work,
        workers,
        args=(devices, directory),
        deadline=_DEADLINE_SECONDS,
      )
    found = [r.get(name) for r in _RESULTS[workers, devices]]
    for result in found:
      if result is None or isinstance(result, str):
        raise AssertionError(f'{name}: {result}')
    return found

  def epochs(self, results, devices):
    """Checks the results, and returns rows by epoch, batch and replica id."""
    for by_epoch in zip(*results, strict=True):
      self.assertLen({len(batches) for batches in by_epoch}, 1, 'batches')
      epoch = []
      for by_worker in zip(*by_epoch, strict=True):
        replicas = []
        for parts, all_rows in by_worker:
          self.assertLen(parts, devices)
          self.assertEqual(all_rows, by_worker[0][1])
          replicas += parts
        self.assertEqual(by_worker[0][1], [len(p) for p in replicas])
        self.assertGreater(sum(by_worker[0][1]), 0, 'nobody has rows')
        epoch.append(replicas)
      yield epoch

  def flat(self, epoch):
    return [x for batch in epoch for rows in batch for x in rows]

  @tiers.named_parameters(*_EVERY)
  def test_same_data_are_split(self, workers, devices):
    for rows, size, policy in _SAME_DATA:
      results = self.results(workers, devices, f'{policy.name}_{rows}')
      for epoch in self.epochs(results, devices):
        self.assertLen(epoch, -(-rows // size))
        for i, replicas in enumerate(epoch):
          inside = [x for part in replicas for x in part]
          want = range(i * size, min((i + 1) * size, rows))
          self.assertCountEqual(inside, want)
          sizes = [len(part) for part in replicas]
          self.assertLessEqual(max(sizes) - min(sizes), 1, 'evenly')

  @tiers.named_parameters(*_EVERY)
  def test_files_are_read_once(self, workers, devices):
    want = [100 * i + r for i, n in enumerate(_FILE_ROWS) for r in range(n)]
    results = self.results(workers, devices, 'file')
    for epoch in self.epochs(results, devices):
      self.assertCountEqual(self.flat(epoch), want)
      # Files are not split: no two workers have rows from the same file.
      files = collections.defaultdict(set)
      for replicas in epoch:
        for replica_id, part in enumerate(replicas):
          for x in part:
            files[x // 100].add(replica_id // devices)
      self.assertTrue(all(len(owners) == 1 for owners in files.values()))

  @tiers.product(
    _EVERY_WORLD,
    name=('off', 'from_function', 'given_up'),
  )
  def test_workers_with_less_data_go_on_without(self, workers, devices, name):
    results = self.results(workers, devices, name)
    limit = 2 if name == 'from_function' else -(-12 // (workers * devices))
    for epoch in self.epochs(results, devices):
      for rank in range(workers):
        mine = [r[rank * devices : (rank + 1) * devices] for r in epoch]
        self.assertCountEqual(self.flat(mine), _own_rows(rank).tolist())
      for replicas in epoch:
        self.assertLessEqual(max(len(part) for part in replicas), limit)
      # The first worker has the fewest rows, and none at the end.
      self.assertEqual(self.flat([epoch[-1][:devices]]), [])

  @tiers.named_parameters(*_EVERY)
  def test_unseeded_shuffle_is_the_same_everywhere(self, workers, devices):
    results = self.results(workers, devices, 'unseeded_shuffle')
    epochs = list(self.epochs(results, devices))
    for epoch in epochs:
      self.assertCountEqual(self.flat(epoch), range(40))
      self.assertNotEqual(self.flat(epoch), list(range(40)))
    self.assertNotEqual(self.flat(epochs[0]), self.flat(epochs[1]))

  @tiers.named_parameters(*_EVERY)
  def test_keras_shuffles_alike_without_a_seed(self, workers, devices):
    for counts in self.results(workers, devices, 'keras_shuffle'):
      self.assertAllClose(counts, [[1.0] * 48, [2.0] * 48], 1e-6, 1e-6)

  @tiers.named_parameters(*_EVERY)
  def test_keras_trains_on_all_of_each_workers_data(self, workers, devices):
    want = np.zeros(100 * workers)
    for rank in range(workers):
      want[_own_rows(rank)] = 2
    for counts in self.results(workers, devices, 'keras_own_data'):
      self.assertAllClose(counts, want, 1e-6, 1e-6)

  @tiers.product(
    _EVERY_WORLD,
    name=('other_data', 'other_seed'),
  )
  def test_different_data_are_refused(self, workers, devices, name):
    for message, ranks in self.results(workers, devices, name):
      self.assertEqual(ranks, tuple(range(1, workers)), message)
      self.assertIn('batch 0 of a data set to be the same', message)
      is_seed = name == 'other_seed'
      self.assertEqual('Fix: call tf.random.set_seed' in message, is_seed)
      self.assertEqual(
        'Fix: pass every worker the whole' in message, not is_seed
      )
      self.assertIn('AutoShardPolicy.OFF', message)


if __name__ == '__main__':
  tf.test.main()
