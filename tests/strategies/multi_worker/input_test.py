"""Workers train on each element exactly once, whichever data they read."""

import collections
import os
import tempfile
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import processes, tf_case, virtual_devices
from tf_strategies import _tf_internal

virtual_devices.configure()
_DEADLINE_SECONDS = 240
_Policy = tf.data.experimental.AutoShardPolicy

# Rows and policy: uneven, and fewer rows than replicas at the end.
_SAME_DATA = ((23, _Policy.DATA), (13, _Policy.AUTO))
_FILE_ROWS = (3, 0, 11, 1, 5, 2)


def _with_policy(dataset, policy):
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = policy
  return dataset.with_options(options)


def _file_names(directory):
  return [os.path.join(directory, str(i)) for i in range(len(_FILE_ROWS))]


def _write_files(directory):
  """Writes TFRecord files with different records, numbered 100 apart."""
  for i, name in enumerate(_file_names(directory)):
    with tf.io.TFRecordWriter(name) as writer:
      for row in range(_FILE_ROWS[i]):
        writer.write(str(100 * i + row).encode())


# Programs of the workers. Each returns, for two epochs, one entry for each batch:
# the rows of each local replica, and the batch's values for all replicas.


def _consume(strategy, distributed, epochs=2):
  seen = []
  for _ in range(epochs):
    seen.append([])
    for batch in distributed:
      parts = strategy.experimental_local_results(batch)
      rows = [p.numpy().tolist() for p in parts]
      seen[-1].append((rows, batch.all_rows.numpy().tolist()))
  return seen


def _share(strategy, dataset, policy=_Policy.AUTO):
  """Consumes batches of 12 rows."""
  dataset = _with_policy(dataset.batch(12), policy)
  return _consume(strategy, strategy.experimental_distribute_dataset(dataset))


def _files(strategy, directory):
  dataset = tf.data.TFRecordDataset(_file_names(directory)).map(
    lambda text: tf.strings.to_number(text, tf.int64)
  )
  return _share(strategy, dataset, _Policy.FILE)


def _own_rows(rank):
  return 100 * rank + np.arange(5 + 9 * rank)


def _from_function(strategy):
  def make(context):
    assert context.num_input_pipelines == strategy.num_workers
    assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
    rows = _own_rows(context.input_pipeline_id)
    return tf.data.Dataset.from_tensor_slices(rows).batch(2)

  return _consume(strategy, strategy.distribute_datasets_from_function(make))


def _failure(strategy, dataset):
  distributed = strategy.experimental_distribute_dataset(dataset)
  try:
    seen = _consume(strategy, distributed, epochs=1)
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


def _abandoned(strategy):
  """Abandons some iterators in the middle, then finishes one."""
  rows = tf.data.Dataset.range
  for dataset in (
    rows(1000).batch(12),
    _with_policy(rows(500 * (1 + strategy.rank)).batch(12), _Policy.OFF),
  ):
    distributed = strategy.experimental_distribute_dataset(dataset)
    for turn in range(6):
      for _ in zip(range(turn + 1), distributed, strict=False):
        pass
  distributed = strategy.distribute_datasets_from_function(
    lambda _: rows(300).batch(2)
  )
  for turn in range(3):
    for _ in zip(range(turn + 1), distributed, strict=False):
      pass
  own = tf.data.Dataset.from_tensor_slices(_own_rows(strategy.rank))
  return _share(strategy, own, _Policy.OFF)


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


_PROGRAMS = {
  'unseeded_shuffle': lambda strategy: _share(
    strategy, tf.data.Dataset.range(40).shuffle(40)
  ),
  'keras_shuffle': _keras_shuffle,
  'keras_own_data': _keras_own_data,
  'from_function': _from_function,
  'other_data': _other_data,
  'other_seed': _other_seed,
  'abandoned': _abandoned,
  **{
    f'{rows}_rows': lambda strategy, rows=rows, policy=policy: _share(
      strategy, tf.data.Dataset.range(rows), policy
    )
    for rows, policy in _SAME_DATA
  },
}


def _work(rank, devices, directory):
  strategy = tfs.MultiWorkerRingStrategy(devices=virtual_devices.names(devices))
  assert strategy.rank == rank
  results = {'file': _files(strategy, directory)}
  for name, program in _PROGRAMS.items():
    try:
      results[name] = program(strategy)
    except Exception:
      results[name] = traceback.format_exc()
      break  # The other workers may be at any point.
  strategy.close()
  return results


class InputTest(tf_case.TestCase):
  """Starts the workers once. The tests read their results."""

  workers, devices = 2, 2

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    _write_files(directory)
    cls.found = processes.run_workers(
      _work,
      cls.workers,
      args=(cls.devices, directory),
      deadline=_DEADLINE_SECONDS,
    )

  def results(self, name):
    """Returns each worker's result for one program."""
    found = [r.get(name) for r in self.found]
    for result in found:
      if result is None or isinstance(result, str):
        raise AssertionError(f'{name}: {result}')
    return found

  def epochs(self, name):
    """Checks the results, and returns rows by epoch, batch and replica id."""
    for by_epoch in zip(*self.results(name), strict=True):
      self.assertLen({len(batches) for batches in by_epoch}, 1, 'batches')
      epoch = []
      for by_worker in zip(*by_epoch, strict=True):
        replicas = []
        for parts, all_rows in by_worker:
          self.assertLen(parts, self.devices)
          self.assertEqual(all_rows, by_worker[0][1])
          replicas += parts
        self.assertEqual(by_worker[0][1], [len(p) for p in replicas])
        self.assertGreater(sum(by_worker[0][1]), 0, 'no worker has rows')
        epoch.append(replicas)
      yield epoch

  def flat(self, epoch):
    return [x for batch in epoch for rows in batch for x in rows]

  def test_same_data_is_split(self):
    for rows, _ in _SAME_DATA:
      for epoch in self.epochs(f'{rows}_rows'):
        self.assertLen(epoch, 2)
        for start, replicas in zip((0, 12), epoch, strict=True):
          inside = [x for part in replicas for x in part]
          self.assertCountEqual(inside, range(start, min(start + 12, rows)))
          sizes = [len(part) for part in replicas]
          self.assertLessEqual(max(sizes) - min(sizes), 1, 'evenly')

  def test_files_are_read_once(self):
    want = [100 * i + r for i, n in enumerate(_FILE_ROWS) for r in range(n)]
    for epoch in self.epochs('file'):
      self.assertCountEqual(self.flat(epoch), want)
      # Files are not split: no two workers have rows from the same file.
      owners = collections.defaultdict(set)
      for replicas in epoch:
        for replica_id, part in enumerate(replicas):
          for x in part:
            owners[x // 100].add(replica_id // self.devices)
      self.assertEqual({len(each) for each in owners.values()}, {1})

  @parameterized.parameters('from_function', 'abandoned')
  def test_workers_without_data_take_part_with_empty_batches(self, name):
    replicas = self.workers * self.devices
    limit = 2 if name == 'from_function' else -(-12 // replicas)
    for epoch in self.epochs(name):
      for rank in range(self.workers):
        first = rank * self.devices
        mine = [r[first : first + self.devices] for r in epoch]
        self.assertCountEqual(self.flat(mine), _own_rows(rank).tolist())
      for replicas in epoch:
        self.assertLessEqual(max(len(part) for part in replicas), limit)
      # The first worker has the fewest rows, and none at the end.
      self.assertEqual(self.flat([epoch[-1][: self.devices]]), [])

  def test_unseeded_shuffle_is_equal_on_all_workers(self):
    epochs = list(self.epochs('unseeded_shuffle'))
    for epoch in epochs:
      self.assertCountEqual(self.flat(epoch), range(40))
      self.assertNotEqual(self.flat(epoch), list(range(40)))
    self.assertNotEqual(self.flat(epochs[0]), self.flat(epochs[1]))

  def test_keras_shuffle_without_seed_is_equal_on_all_workers(self):
    for counts in self.results('keras_shuffle'):
      self.assertAllClose(counts, [[1.0] * 48, [2.0] * 48], 1e-6, 1e-6)

  def test_keras_trains_on_all_data_of_each_worker(self):
    want = np.zeros(100 * self.workers)
    for rank in range(self.workers):
      want[_own_rows(rank)] = 2
    for counts in self.results('keras_own_data'):
      self.assertAllClose(counts, want, 1e-6, 1e-6)

  @parameterized.parameters(
    ('other_data', 'Fix: pass every worker the whole'),
    ('other_seed', 'Fix: call tf.random.set_seed'),
  )
  def test_different_data_is_refused(self, name, fix):
    for message, ranks in self.results(name):
      self.assertEqual(ranks, tuple(range(1, self.workers)), message)
      self.assertIn('batch 0 of a data set to be the same', message)
      self.assertIn(fix, message)
      self.assertIn('AutoShardPolicy.OFF', message)


@pytest.mark.soak
class ThreeWorkersTest(InputTest):
  workers, devices = 3, 1


if __name__ == '__main__':
  tf.test.main()
