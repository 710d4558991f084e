"""A worker of `slow_links` with `MultiWorkerRingStrategy`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import tf_strategies as tfs
from benchmarks import slow_link_task as task


class Actor:
  """One worker; `pool_worker` calls the methods.

  Args:
    rank: of this worker.
  """

  def __init__(self, rank: int):
    self._rank = rank

  def train(
    self,
    addresses: Sequence[str],
    data_path: str,
    global_batch_size: int,
    steps: int,
    seed: int,
    options: Mapping[str, Any],
  ) -> dict[str, object]:
    """Trains a net anew; see `slow_link_task.Clock.report`.

    Args:
      addresses: 'host:port' of each worker.
      data_path: of the images.
      global_batch_size: rows of a step on all workers.
      steps: of the training.
      seed: of weights and order.
      options: of `RingOptions`; `local_steps` for `tfs.keras.LocalSteps`.
    """
    options = dict(options)
    every = options.pop('local_steps', None)
    images = task.Images(data_path, global_batch_size, seed)
    place = {'type': 'worker', 'index': self._rank}
    text = json.dumps({'cluster': {'worker': addresses}, 'task': place})
    cluster = tfs.cluster.ClusterConfig.from_env({'TF_CONFIG': text})
    strategy = tfs.MultiWorkerRingStrategy(
      cluster, tfs.RingOptions(**options), devices=['CPU:0']
    )
    keras.utils.set_random_seed(seed)
    with strategy.scope():
      model = keras.Sequential(
        [
          keras.Input([images.x.shape[1]]),
          *(keras.layers.Dense(units, 'relu') for units in task.HIDDEN),
          keras.layers.Dense(task.CLASSES),
        ]
      )
      optimizer = keras.optimizers.Adam(task.LEARNING_RATE)
      if every is not None:
        # The default momentum is for long runs.
        outer = keras.optimizers.SGD(0.7, momentum=0.5)
        optimizer = tfs.keras.LocalSteps(optimizer, every=every, outer=outer)
      loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
      model.compile(optimizer, loss)
    rows = images.batches(steps)
    x, y = tf.constant(images.x), tf.constant(images.y)
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    dataset = dataset.map(lambda i: (tf.gather(x, i), tf.gather(y, i)))
    # The graph is built outside of the time.
    model.fit(dataset.take(1), verbose=0)
    clock = task.Clock(images, model.get_weights)
    tick = keras.callbacks.LambdaCallback(
      on_train_batch_end=lambda batch, logs: clock.tick()
    )
    model.fit(dataset.prefetch(2), verbose=0, callbacks=[tick])
    strategy.close()
    return clock.report()
