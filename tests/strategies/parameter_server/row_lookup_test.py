"""Steps read and write only the table rows that occur in their batch."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import parameter_servers, tf_case, tiers
from tests.programs import common

layers, ops = keras.layers, keras.ops

_TOKENS = 23
_ROWS = 21
_BATCH = 8  # The last batch has 5 rows: two workers share them unevenly.


class Tables(layers.Layer):
  """A layer that takes rows in several ways. Negative ids count from the end."""

  def __init__(self):
    super().__init__()
    self.tied = layers.ReversibleEmbedding(_TOKENS, 4)

  def build(self, shape):
    self.tied.build()
    self.table = self.add_weight(shape=[_TOKENS, 4], name='table')
    self.other = self.add_weight(shape=[_TOKENS, 4], name='other')

  @tf.function
  def call(self, x):
    rows = ops.take(self.table, x - 3, axis=0)
    rows += ops.take(self.other.value, x, axis=0)
    # Whole table: by columns, and in a branch.
    columns = ops.take(self.table, [2, 0], axis=1)
    branch = ops.cond(
      ops.sum(x) > 0,
      lambda: ops.take(self.other, x, axis=0),
      lambda: ops.zeros_like(rows),
    )
    hidden = ops.mean(rows + branch, 1) * ops.sum(columns)
    # The whole table is also the kernel of an output.
    return self.tied(hidden + ops.mean(self.tied(x), 1), reverse=True)


def train():
  """Returns the history, weights, state of the optimizer and predictions."""
  model = keras.Sequential(
    [layers.Input([5], dtype='int32'), Tables(), layers.Dense(1)]
  )
  adam = keras.optimizers.Adam(0.05, amsgrad=True)
  model.compile(tfs.keras.LazyRows(adam), 'mse')
  rng = np.random.default_rng(6)
  ids = rng.integers(1, _TOKENS, [_ROWS, 5])
  ids *= np.arange(5) < np.arange(1, _ROWS + 1)[:, None] % 6
  targets = rng.normal(size=[_ROWS, 1]).astype(np.float32)
  found = common.fitted(model, ids, targets, batch_size=_BATCH, shuffle=False)
  return found, model.predict(ids, batch_size=_BATCH, verbose=0)


def train_on_servers(mode, parts):
  partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner
  with contextlib.closing(
    tfs.ParameterServerStrategy(
      mode=mode, variable_partitioner=partitioner(parts)
    )
  ) as strategy:
    return common.run(train, strategy)


class EqualityTest(tf_case.TestCase):
  @tiers.parameters(
    tiers.soak('async', 1, 1), ('sync', 2, 2), tiers.soak('bounded', 1, 2)
  )
  def test_training_equals_one_device(self, mode, num_workers, parts):
    with parameter_servers.Job(num_workers, 2) as job:
      found = job.run(train_on_servers, (mode, parts))
    want = common.run(train)
    tf.nest.assert_same_structure(want, found)
    self.assertAllClose(want, found, 1e-6, 2e-6)


if __name__ == '__main__':
  tf.test.main()
