"""Rows of DynamicEmbedding on servers when tasks die: counted, and restored."""

import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import dynamic_tables, parameter_servers, tiers

_STEPS = 60
_IDS = 40


class _Slow(keras.layers.Layer):
  """Returns its input after a while, so that kills happen during a step."""

  def call(self, x):
    matrix = tf.eye(512) * 0.5
    y = tf.matmul(tf.stop_gradient(x), tf.ones([x.shape[1], 512]))
    _, y = tf.while_loop(
      lambda i, _: i < 300,
      lambda i, y: (i + 1, tf.tanh(tf.matmul(y, matrix))),
      [0, y],
    )
    return x + 1e-30 * y[:, :1]

  def compute_output_shape(self, input_shape):
    return input_shape


def train_until_killed(directory, mode, checkpoint_steps):
  """Counts of ids that step s of 60 all use; tells how far it is."""
  options = {'mode': mode}
  if checkpoint_steps:
    options['checkpoint_dir'] = os.path.join(directory, 'checkpoints')
    options['checkpoint_steps'] = checkpoint_steps
  strategy = tfs.ParameterServerStrategy(recovery_timeout=120, **options)
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.Input([2], dtype='int64'),
        tfs.keras.DynamicEmbedding(dynamic_tables.WIDTH),
        keras.layers.Flatten(),
        _Slow(),
        keras.layers.Dense(1),
      ]
    )
    model.compile('adam', 'mse')
  x = np.arange(_IDS).reshape([-1, 2])
  x, y = np.tile(x, [_STEPS, 1]), np.ones([_STEPS * _IDS // 2, 1])
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(_IDS // 2)

  def tell(batch, logs):
    pathlib.Path(directory, 'step').write_text(str(batch))

  callback = keras.callbacks.LambdaCallback(on_train_batch_end=tell)
  model.fit(data, verbose=0, callbacks=[callback])
  found = model.layers[0].usage(), model.layers[0].report()
  found = *found, strategy.report(), int(model.optimizer.iterations.numpy())
  strategy.close()
  return found


class KillTest(parameterized.TestCase, tf.test.TestCase):
  def kill(self, task, mode, checkpoint_steps=None, restarts=True):
    directory = self.create_tempdir().full_path
    step = pathlib.Path(directory, 'step')
    with parameter_servers.Job(num_workers=2, num_ps=2) as job:
      job.start_chief(train_until_killed, (directory, mode, checkpoint_steps))
      ends_at = time.monotonic() + 120
      while not (step.exists() and int(step.read_text() or 0) > 15):
        self.assertLess(time.monotonic(), ends_at)
        time.sleep(0.05)
      job.kill(*task)
      if restarts:
        job.start(*task)
      return job.wait().result()

  @tiers.named_parameters(
    tiers.smoke('async', 'async'), tiers.soak('sync', 'sync')
  )
  def test_worker_counts_are_exact(self, mode):
    usage, report, strategy, iterations = self.kill(
      ('worker', 1), mode, restarts=False
    )
    self.assertAllEqual(usage['ids'], np.arange(_IDS))
    self.assertAllEqual(usage['uses'], np.full([_IDS], _STEPS))
    self.assertEqual((iterations, strategy['steps']), (_STEPS, _STEPS))
    self.assertEqual(report['rows'], _IDS)

  @tiers.named_parameters(
    tiers.soak('sync', 'sync'), tiers.soak('async', 'async')
  )
  def test_server_rows_are_those_of_the_checkpoint(self, mode):
    usage, report, strategy, iterations = self.kill(('ps', 1), mode, 5)
    (recovery,) = strategy['recoveries']
    self.assertEqual(recovery['server'], 1)
    self.assertEqual(iterations, _STEPS - recovery['lost_steps'])
    self.assertAllEqual(usage['ids'], np.arange(_IDS))
    self.assertAllEqual(usage['uses'], np.full([_IDS], iterations))
    self.assertEqual(report['rows'], _IDS)


if __name__ == '__main__':
  tf.test.main()
