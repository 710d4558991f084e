"""Trains with Keras's `fit` on several workers, which may die and restart.

  tfs launch --num_workers=3 --max_restarts=3 -- python examples/fit_workers.py

To kill a worker, run `kill -9` with its process number. The others repeat the step, and
the launcher restarts the worker. The result is the same. It needs scikit-learn
(`pip install '.[examples]'`).
"""

import math
import os

import keras
from sklearn.datasets import load_digits

import tf_strategies as tfs

EPOCHS, BATCH = 30, 64


def train(job):
  """Trains on this worker, together with the others."""
  print('process', os.getpid())
  x, y = load_digits(return_X_y=True)
  data = ((x / 16).astype('float32'), y)
  options = tfs.data.PipelineOptions(global_batch_size=BATCH, seed=1)

  keras.utils.set_random_seed(1)
  with job.strategy.scope():
    layers = [keras.layers.Dense(64, 'relu'), keras.layers.Dense(10, 'softmax')]
    model = keras.Sequential([keras.Input([64]), *layers])
    loss = 'sparse_categorical_crossentropy'
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=['accuracy'])
  job.restore(model)  # A worker that joins gets the state of the others.

  def batches(epoch, step):
    return tfs.data.make_dataset(
      data, options, training=True, epochs=EPOCHS, start=(epoch, step)
    )

  steps = math.ceil(len(x) / BATCH)
  history = job.fit(model, batches, epochs=EPOCHS, steps_per_epoch=steps)
  return history.history['accuracy'][-1]


if __name__ == '__main__':
  # By default the job continues while a majority of its last group is alive.
  print(f'accuracy {tfs.elastic.run(train, tfs.ElasticOptions()):.3f}')
