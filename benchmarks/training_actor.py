"""The process of a worker of `training_step`, which trains models with strategies."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tf_strategies import process_group


class BlockClock(keras.callbacks.Callback):
  """Records the time and the CPU time of this process after each block of steps.

  Args:
    steps: number of steps per block.
  """

  def __init__(self, steps: int):
    super().__init__()
    self._steps = steps
    self._times: list[float] = []
    self._cpu_times: list[float] = []

  def on_train_batch_end(self, batch, logs=None):
    """Records the time at the end of a block."""
    if (batch + 1) % self._steps == 0:
      self._times.append(time.perf_counter())
      self._cpu_times.append(time.process_time())

  def seconds(self) -> list[float]:
    """Returns the seconds per step of each block, without the warm-up block."""
    return (np.diff(self._times) / self._steps).tolist()

  def cpu_seconds(self) -> list[float]:
    """Returns the CPU seconds per step of all threads, as `seconds` does."""
    return (np.diff(self._cpu_times) / self._steps).tolist()


class Actor:
  """The models of one worker. `pool_worker` calls the methods.

  Args:
    rank: rank of this worker.
  """

  def __init__(self, rank: int):
    self._rank = rank
    self._models: dict[str, keras.Model] = {}
    self._rows: dict[str, int] = {}

  def set_up(
    self,
    peer: str,
    strategy: str,
    options: Mapping[str, Any],
    addresses: Sequence[str],
    shape: Mapping[str, int],
    timeout_seconds: float,
    optimizer: str = 'sgd',
    local_steps: int = 0,
  ) -> int:
    """Builds a model under a strategy.

    Args:
      peer: name of the peer.
      strategy: 'ring', 'collective', 'one_device' or 'apart'.
      options: options of the strategy.
      addresses: 'host:port' of this peer on each worker.
      shape: `width` and `layers` of the model, and `batch_rows` of the whole batch.
      timeout_seconds: how long to wait for the other workers.
      optimizer: name of the optimizer.
      local_steps: number of steps of `LocalSteps`, or 0 to train without it.

    Returns:
      Size of the trainable variables in bytes.
    """
    tf.config.set_visible_devices([], 'GPU')
    made = self._strategy(strategy, options, addresses, timeout_seconds)
    keras.utils.set_random_seed(1)
    with made.scope():
      model = _dense_model(shape['width'], shape['layers'])
      if local_steps:
        wrapped = tfs.keras.LocalSteps(optimizer, local_steps)
      else:
        wrapped = optimizer
      model.compile(wrapped, 'mse')
    self._models[peer] = model
    self._rows[peer] = shape['batch_rows']
    return sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)

  def run(self, peer: str, blocks: int, steps: int) -> dict[str, Any]:
    """Trains a warm-up block, then the measured blocks.

    Args:
      peer: name of the peer.
      blocks: number of measured blocks.
      steps: number of steps per block.

    Returns:
      `seconds` and `cpu_seconds` per step of each block, the mean `loss` of all steps,
      and the `bytes_sent` per step, if they are counted.
    """
    model, rows = self._models[peer], self._rows[peer]
    width = model.input_shape[-1]
    count = (1 + blocks) * steps * rows
    values = np.random.default_rng(1).standard_normal((count, width))
    x = values.astype(np.float32)
    clock = BlockClock(steps)
    group = getattr(model.distribute_strategy, 'process_group', None)
    sent = group and group.bytes_sent
    history = model.fit(
      x,
      np.tanh(x),
      batch_size=rows,
      shuffle=False,
      verbose=0,
      callbacks=[clock],
    )
    return {
      'seconds': clock.seconds(),
      'cpu_seconds': clock.cpu_seconds(),
      'loss': float(history.history['loss'][-1]),
      'bytes_sent': group
      and (group.bytes_sent - sent) / ((1 + blocks) * steps),
    }

  def _strategy(self, name, options, addresses, timeout_seconds):
    if name in ('one_device', 'apart'):
      return tf.distribute.get_strategy()
    task = {'type': 'worker', 'index': self._rank}
    text = json.dumps({'cluster': {'worker': addresses}, 'task': task})
    cluster = tfs.cluster.ClusterConfig.from_env({'TF_CONFIG': text})
    if name == 'collective':
      return tfs.MultiWorkerCollectiveStrategy(
        cluster,
        tfs.CollectiveOptions(
          communication='ring',
          start_timeout_seconds=timeout_seconds,
          **options,
        ),
        devices=['CPU:0'],
      )
    group = process_group.GroupOptions.from_env(
      rendezvous_timeout_seconds=timeout_seconds,
      collective_timeout_seconds=timeout_seconds,
    )
    options = dict(options)
    is_sharded = options.pop('shard_optimizer_state', False)
    return tfs.MultiWorkerRingStrategy(
      cluster,
      tfs.RingOptions(group=group, **options),
      devices=['CPU:0'],
      shard_optimizer_state=is_sharded,
    )


def _dense_model(width: int, layers: int) -> keras.Model:
  """Returns a model with nearly all parameters in square matrices."""
  return keras.Sequential(
    [
      keras.Input([width]),
      *(keras.layers.Dense(width, 'relu') for _ in range(layers - 1)),
      keras.layers.Dense(width),
    ]
  )
