"""How many messages a step with a table in parts sends."""

import collections
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import parameter_servers
from tf_strategies.strategies.parameter_server import worker_function

_BATCH = 8
_OPTIMIZERS = {
  'adagrad': lambda: keras.optimizers.Adagrad(0.1),
  'lazy_adam': lambda: tfs.keras.LazyRows(keras.optimizers.Adam(0.05)),
}


def messages_of_a_step(optimizer):
  """Returns how many tensors and calls a step sends to each server.

  Also returns the operations that read a whole table.
  """
  rows = 100
  strategy = tfs.ParameterServerStrategy(
    # Of the table alone.
    variable_partitioner=lambda shape, dtype: (
      [1 + (shape[0] == rows)] + [1] * (shape.rank - 1)
    )
  )
  graphs, trace = [], worker_function.concrete

  def concrete(*args):
    function = trace(*args)
    graphs.append(function.graph)
    return function

  try:
    with strategy.scope():
      model = keras.Sequential(
        [keras.layers.Embedding(rows, 4), keras.layers.Dense(1)]
      )
      model.compile(_OPTIMIZERS[optimizer](), 'mse')
    data = np.zeros([_BATCH], np.int32), np.ones([_BATCH, 1], np.float32)
    with mock.patch.object(worker_function, 'concrete', concrete):
      model.fit(*data, batch_size=_BATCH, verbose=0)
  finally:
    strategy.close()
  sent, calls, whole = collections.defaultdict(set), collections.Counter(), []
  for op in graphs[-1].get_operations():  # The last that is traced is run.
    if '/job:ps/' not in op.device:
      continue
    server = tf.DeviceSpec.from_string(op.device).task
    calls[server] += op.type == 'StatefulPartitionedCall'
    if any(rows // 2 in t.shape for t in op.outputs if t.shape.rank == 2):
      whole.append(op.name)
    for tensor in op.inputs:
      is_sent = tensor.op.type != 'Const' and tensor.dtype != tf.resource
      if is_sent and tensor.op.device != op.device:
        sent[server].add(tensor.name)
  return [(len(sent[server]), calls[server]) for server in (0, 1)], whole


class MessagesTest(parameterized.TestCase):
  @parameterized.parameters('adagrad', 'lazy_adam')
  def test_a_step_sends_few_messages(self, optimizer):
    with parameter_servers.Job(num_workers=1, num_ps=2) as job:
      found, whole = job.run(messages_of_a_step, (optimizer,))
    self.assertEmpty(whole)
    # Besides ids: rows with their numbers; small gradients, all that updates need, and
    # what the step counts. That is written on server 0, by itself, last.
    self.assertEqual(found, [(2, 2), (2, 1)])


if __name__ == '__main__':
  tf.test.main()
