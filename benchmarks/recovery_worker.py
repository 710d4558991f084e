"""A worker of `benchmarks.recovery`, which trains until it is killed.

  python -m benchmarks.recovery_worker /tmp/steps_0 64

After each committed step it writes a line with the time, the number of workers of the
step, and the number of the step. Its cluster is in TF_CONFIG.
"""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs

_FEATURES = 64
_ROWS = 48


class _StepLog(keras.callbacks.Callback):
  """Writes a line after each step."""

  def __init__(self, file, strategy):
    super().__init__()
    self._file = file
    self._strategy = strategy

  def on_train_batch_end(self, batch, logs=None):
    workers = self._strategy.num_workers
    self._file.write(f'{time.time()} {workers} {batch}\n')


def _batches(epoch, step):
  """Returns the same batch for every step, on all workers."""
  del epoch, step
  x = np.random.default_rng(0).normal(size=(_ROWS, _FEATURES))
  x = x.astype(np.float32)
  return tf.data.Dataset.from_tensors((x, x.sum(1, keepdims=True))).repeat()


def main(path, width):
  """Trains in an elastic job until the process is ended."""

  def train(job):
    with job.strategy.scope():
      model = keras.Sequential(
        [
          keras.layers.Input([_FEATURES]),
          keras.layers.Dense(int(width), 'relu'),
          keras.layers.Dense(int(width), 'relu'),
          keras.layers.Dense(1),
        ]
      )
      model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), 'mse')
    job.restore(model)
    step_log = _StepLog(file, job.strategy)
    job.fit(model, _batches, 1, 10**6, [step_log], verbose=0)

  with open(path, 'a', 1, encoding='utf-8') as file:
    tfs.elastic.run(train, tfs.ElasticOptions(max_failures=10**6))


if __name__ == '__main__':
  main(*sys.argv[1:])
