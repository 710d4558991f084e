"""Steps with backup workers, and later calls, do not wait for late workers."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import parameter_servers

_ROUNDS = 5
_EPOCHS = 2
_LATE = 2  # The worker that is late.
# Far longer than the rest of the test, which must not wait for it.
_FOREVER = 120.0


def _rows(worker, seconds):
  """Returns batches of three distinct numbers. Those of the late worker are slow."""
  first = 3 * _ROUNDS * worker
  rows = tf.data.Dataset.range(first, first + 3 * _ROUNDS).batch(3)
  rows = rows.map(lambda i: tf.cast(i[:, None], tf.float32) / 100)
  if worker == _LATE and seconds:
    # A dataset that sleeps, since a worker cannot run Python code.
    rows = _sleeping(rows, seconds)
  return rows.map(lambda x: (x, x))


def _sleeping(dataset, seconds):
  spec = dataset.element_spec
  variant = tf.raw_ops.SleepDataset(
    input_dataset=tf.data.experimental.to_variant(dataset),
    sleep_microseconds=tf.constant(int(1e6 * seconds), tf.int64),
    output_types=[spec.dtype],
    output_shapes=[spec.shape],
  )
  return tf.data.experimental.from_variant(variant, spec)


def _read_by_workers(strategy, seconds):
  return strategy.distribute_datasets_from_function(
    lambda context: _rows(context.input_pipeline_id, seconds)
  )


def _model(strategy):
  with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-2), 'mse', metrics=['mae'])
  return model


def run_with_a_late_worker(directory):
  """Trains, evaluates, predicts and saves. Returns the results and late workers."""
  strategy = tfs.ParameterServerStrategy(
    mode='sync', backup_workers=1, checkpoint_dir=directory
  )
  model = _model(strategy)
  tested = _read_by_workers(strategy, 0.0)
  seen = []

  class Reads(keras.callbacks.Callback):
    """Reads a variable after each batch."""

    def on_train_batch_end(self, batch, logs=None):
      seen.append(int(self.model.optimizer.iterations.numpy()))

  history = model.fit(
    _read_by_workers(strategy, _FOREVER),
    epochs=_EPOCHS,
    validation_data=tested,
    verbose=0,
    callbacks=[Reads()],
  ).history
  strategy.join()
  found = {
    'seen': seen,
    'report': strategy.report(),
    'val_loss': history['val_loss'],
    'weights': model.get_weights(),
    'saved': strategy.save(),
    'rows': float(model.metrics[0].variables[1].numpy()),
    'evaluation': model.evaluate(_all_rows(), verbose=0)[0],
    'predictions': model.predict(tested, verbose=0),
    'late': set(strategy._pool._running),  # pylint: disable=protected-access
  }
  strategy.close()
  return found


def _all_rows():
  first, *others = (_rows(worker, 0.0) for worker in range(3))
  for each in others:
    first = first.concatenate(each)
  return first


class LateWorkersTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_no_call_waits_for_a_late_worker(self):
    steps = _EPOCHS * _ROUNDS
    with parameter_servers.Job(num_workers=3, num_ps=1) as job:
      # A fresh process shuts down its interpreter, as a program does.
      job.start_function(
        ('chief', 0),
        run_with_a_late_worker,
        (self.create_tempdir().full_path,),
        {'TF_CONFIG': job.tf_config('chief', 0)},
        is_fresh=True,
      )
      outcome = job.wait()
      ended_after = time.time() - outcome.ended_at
    found = outcome.result()
    self.assertEqual(found['late'], {_LATE})
    self.assertLess(ended_after, _FOREVER / 2)
    self.assertEqual(found['seen'], list(range(1, steps + 1)))
    self.assertEqual(found['report']['steps'], steps)
    self.assertEqual(found['report']['dropped'], steps)
    self.assertEqual(found['rows'], 3 * 3 * _ROUNDS)
    kernel, bias = found['weights']
    x = np.arange(3 * 3 * _ROUNDS, dtype=np.float32)[:, None] / 100
    want = x @ kernel + bias
    loss = np.mean((want - x) ** 2)
    self.assertAllClose(loss, found['evaluation'], 1e-5, 1e-6)
    self.assertAllClose(loss, found['val_loss'][-1], 1e-5, 1e-6)
    # The first batches of all workers, then the second ones.
    by_worker = want.reshape([3, _ROUNDS, 3, 1])
    self.assertAllClose(
      by_worker.swapaxes(0, 1).reshape([-1, 1]),
      found['predictions'],
      1e-5,
      1e-6,
    )


if __name__ == '__main__':
  tf.test.main()
