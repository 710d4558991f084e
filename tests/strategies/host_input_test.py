"""Every kind of batch is split evenly and in order, without iterators."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import tf_case, virtual_devices

virtual_devices.configure()


_Named = collections.namedtuple('_Named', 'x')


def _strategy(replicas=4):
  return tfs.RingMirroredStrategy(virtual_devices.names(replicas))


def _aligned(array):
  """Returns a copy at an aligned address, which TensorFlow uses without copying."""
  memory = np.empty(array.nbytes + 64, np.uint8)
  begin = -memory.ctypes.data % 64
  aligned = memory[begin : begin + array.nbytes].view(array.dtype)
  aligned = aligned.reshape(array.shape)
  aligned[...] = array
  return aligned


class HostInputTest(tf_case.TestCase):
  @parameterized.parameters(
    (11, 8, [[2, 2, 2, 2], [1, 1, 1, 0]]),
    (10, 10, [[3, 3, 2, 2]]),
  )
  def test_rows_are_split_evenly_and_in_order(self, rows, batch_size, expected):
    dataset = tf.data.Dataset.range(rows).batch(batch_size)
    batches = _strategy().experimental_distribute_dataset(dataset)
    parts = [[v.numpy() for v in batch.values] for batch in batches]
    self.assertEqual([[*map(len, batch)] for batch in parts], expected)
    together = np.concatenate([rows for batch in parts for rows in batch])
    self.assertAllEqual(together, np.arange(rows))

  @pytest.mark.smoke
  def test_structures_ragged_and_sparse_tensors_and_strings(self):
    ragged = tf.ragged.constant([[1], [2, 3], [], [4], [5, 6]])
    sparse = tf.sparse.from_dense(np.diag([1.0, 2.0, 3.0, 4.0, 5.0]))
    names = tf.constant(list('abcde'))
    dataset = tf.data.Dataset.from_tensor_slices(
      {'r': ragged, 's': sparse, 'n': names}
    ).batch(5)
    [batch] = _strategy(2).experimental_distribute_dataset(dataset)
    self.assertEqual(batch['r'].values[0].to_list(), [[1], [2, 3], []])
    self.assertEqual(batch['r'].values[1].to_list(), [[4], [5, 6]])
    dense = [tf.sparse.to_dense(v).numpy() for v in batch['s'].values]
    self.assertAllEqual(np.concatenate(dense), np.diag([1, 2, 3, 4, 5.0]))
    self.assertAllEqual(batch['n'].values[1], [b'd', b'e'])

  def test_training_does_not_change_arrays_of_a_generator(self):
    """Uses 64 rows on 4 replicas, so that every part begins at an aligned address."""
    rng = np.random.default_rng(0)
    x = _aligned(rng.normal(size=(64, 4)).astype(np.float32))
    y = _aligned(rng.normal(size=64).astype(np.float32))
    before = x.copy(), y.copy()

    def batches():
      for _ in range(6):
        yield x, y

    with _strategy().scope():
      model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
      model.compile('sgd', 'mse', metrics=['mae'])
    model.fit(batches(), steps_per_epoch=4, verbose=0)
    self.assertAllEqual(x, before[0])
    self.assertAllEqual(y, before[1])

  @parameterized.product(
    make=(
      tfs.RingMirroredStrategy,
      lambda devices: tfs.MultiWorkerRingStrategy(devices=devices),
    ),
    case=(
      (enumerate, True),
      (tf.autograph.experimental.do_not_convert(iter), False),
    ),
  )
  def test_python_loop_over_data_in_a_graph_raises(self, make, case):
    consume, captured = case
    strategy = make(virtual_devices.names(2))
    dataset = tf.data.Dataset.range(8).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    traced = []

    @tf.function
    def loop(given):
      for _ in consume(iterator if captured else given):
        traced.append(1)
        assert len(traced) < 100, 'tracing does not end'

    with self.assertRaises(tfs.errors.UnsupportedOptionError) as caught:
      loop(iterator)
    # TensorFlow's strategies raise the same type.
    self.assertIsInstance(caught.exception, NotImplementedError)
    self.assertEmpty(traced)
    self.assertLen([batch for _, batch in enumerate(iterator)], 2)

  def test_autograph_loops_and_next_in_a_graph(self):
    strategy = _strategy(2)
    dataset = tf.data.Dataset.range(8).batch(3)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def total(batch):
      parts = strategy.run(tf.reduce_sum, args=(batch,))
      return strategy.reduce('SUM', parts, axis=None)

    @tf.function
    def loop(iterator):
      result = total(next(iterator))
      for batch in iterator:
        result += total(batch)
      fresh = iter(distributed)
      for batch in fresh:
        result += total(batch)
      for batch in distributed:
        result += total(batch)
      return result

    self.assertEqual(int(loop(iter(distributed))), 3 * sum(range(8)))

  def test_next_inside_a_replica_is_refused(self):
    strategy = _strategy(2)
    dataset = tf.data.Dataset.range(8).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def draw(iterator):
      return next(iterator)

    for function in (draw, tf.function(draw)):
      with self.assertRaisesRegex(
        tfs.errors.UnsupportedOptionError, 'args=.next.iterator'
      ):
        strategy.run(function, args=(iterator,))
    self.assertLen(list(iterator), 2)

  def test_unbatched_dataset_is_refused(self):
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, 'global_batch_size'
    ):
      _strategy().experimental_distribute_dataset(tf.data.Dataset.range(3))

  def test_distributed_dataset_is_not_split_again(self):
    strategy = _strategy(2)
    x = np.arange(12.0, dtype=np.float32).reshape([6, 2])
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(3)
    with strategy.scope():
      model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
      model.compile('sgd', 'mse')
    once = strategy.experimental_distribute_dataset(dataset)
    self.assertIs(strategy.experimental_distribute_dataset(once), once)
    model.fit(once, epochs=2, verbose=0)
    self.assertEqual(model.optimizer.iterations.numpy(), 4)


class WorkerInputTest(tf_case.TestCase):
  """Elements keep their structure even where the last replicas get no rows."""

  def batches(self, dataset):
    """Returns the dataset, distributed on a worker with two replicas."""
    strategy = tfs.MultiWorkerRingStrategy(devices=virtual_devices.names(2))
    self.addCleanup(strategy.close)
    return strategy.distribute_datasets_from_function(lambda _: dataset)

  @parameterized.parameters(
    lambda x: x, lambda x: (x, {'x': x}), lambda x: _Named(x)
  )
  def test_structure_is_kept(self, make):
    dataset = tf.data.Dataset.from_tensor_slices(make(np.arange(5))).batch(2)
    seen = []
    for batch in self.batches(dataset):
      tf.nest.assert_same_structure(batch, make(0))
      parts = tf.nest.flatten(batch)[0].values
      seen.append([part.numpy().tolist() for part in parts])
    self.assertEqual(seen, [[[0, 1], [2, 3]], [[4], []]])

  def test_scalar_elements(self):
    seen = [
      ([int(part) for part in batch.values], batch.all_rows.numpy().tolist())
      for batch in self.batches(tf.data.Dataset.range(1, 4))
    ]
    self.assertEqual(seen, [([1, 2], [1, 1]), ([3, 0], [1, 0])])

  def test_batch_of_one_local_replica_is_a_tensor(self):
    strategy = tfs.MultiWorkerRingStrategy(devices=[virtual_devices.name(0)])
    self.addCleanup(strategy.close)
    dataset = tf.data.Dataset.range(4).batch(3)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    self.assertEqual((batch.shape, batch.dtype), ((3,), tf.int64))
    self.assertAllEqual(np.asarray(batch), [0, 1, 2])
    self.assertAllEqual(10 - batch * 2, [10, 8, 6])
    self.assertAllEqual(batch[1:], [1, 2])
    self.assertEqual(int(tf.function(tf.reduce_sum)(batch)), 3)


if __name__ == '__main__':
  tf.test.main()
