"""Programs of the chief of a parameter server job whose tasks are killed."""

import dataclasses
import logging
import os
import re
import socket
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging as absl_logging

import tf_strategies as tfs
from tests.programs import runner

ROWS = 3200
BATCH = 32
STEPS_PER_EPOCH = ROWS // BATCH


@dataclasses.dataclass
class Run:
  """The result of a training run.

  Attributes:
    iterations: iterations of the optimizer at the end.
    batches: number of batches that `fit` trained on in this process.
    rows_counted: number of rows that the metric saw in the last epoch.
    weights: weights of the model.
    report: report of the strategy.
    step_ended: `time.time()` at the end of each batch.
    logged: warnings and errors with their times.
    history: history of `fit`.
  """

  iterations: int
  batches: int
  rows_counted: float
  weights: list
  report: dict[str, Any]
  step_ended: list[float]
  logged: list[tuple[float, str]]
  history: dict[str, list[float]]


def train(
  progress_path: str,
  epochs: int,
  worker_input: bool,
  options: dict[str, Any],
  validates: bool = False,
  steps_per_execution: int = 1,
) -> Run:
  """Trains a small model with `fit`, and writes the number of batches to a file.

  A file with the suffix `.test` receives the number of evaluated batches.
  """
  logged = _record_log()
  rng = np.random.default_rng(5)
  x = rng.normal(size=(ROWS, 8, 8, 1)).astype(np.float32)
  y = rng.integers(0, 10, ROWS)
  keras.utils.set_random_seed(3)
  strategy = tfs.ParameterServerStrategy(**options)
  with strategy.scope():
    model = keras.Sequential(
      [
        keras.Input([8, 8, 1]),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation='relu'),
        keras.layers.Dense(10),
      ]
    )
    model.compile(
      'adam',
      keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      metrics=['accuracy'],
      jit_compile=False,
      steps_per_execution=steps_per_execution,
    )
  step_ended = []

  class Progress(keras.callbacks.Callback):
    """Slows training down, so that a test can kill a task in the middle."""

    tested = 0

    def on_train_batch_end(self, batch, logs=None):
      time.sleep(0.01)
      step_ended.append(time.time())
      write_number(progress_path, len(step_ended))

    def on_test_batch_end(self, batch, logs=None):
      time.sleep(0.01)
      self.tested += 1
      write_number(progress_path + '.test', self.tested)

  arguments = {
    'epochs': epochs,
    'verbose': 0,
    'callbacks': [Progress(), *resuming(strategy, model)],
  }
  if validates:
    arguments['validation_data'] = (x[: ROWS // 4], y[: ROWS // 4])
    arguments['validation_batch_size'] = BATCH
  if worker_input:
    dataset = strategy.distribute_datasets_from_function(
      lambda context: (
        tf.data.Dataset.from_tensor_slices((x, y))
        .shard(context.num_input_pipelines, context.input_pipeline_id)
        .batch(BATCH)
      )
    )
    history = model.fit(dataset, **arguments)
  else:
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, **arguments)
  return Run(
    int(model.optimizer.iterations.numpy()),
    len(step_ended),
    float(model.metrics[0].variables[1].numpy()),
    model.get_weights(),
    strategy.report(),
    step_ended,
    logged,
    history.history,
  )


def start_with_port_in_use() -> str:
  """Returns the error of a chief whose port is in use."""
  host, _, port = tfs.cluster.ClusterConfig.from_env().address.rpartition(':')
  with socket.create_server((host, int(port))):
    try:
      tfs.ParameterServerStrategy()
    except tfs.errors.RendezvousError as e:
      return str(e)
  return ''


def resuming(strategy, model) -> list:
  """Returns a list with a `tfs.Run` if the strategy saves."""
  import tf_strategies as tfs

  directory = strategy.options.checkpoint_dir
  return [] if directory is None else [tfs.Run(directory, model)]


def write_number(path: str, number: int) -> None:
  """Writes a number to a file atomically."""
  with open(path + '.part', 'w') as f:
    f.write(str(number))
  os.replace(path + '.part', path)


def _record_log() -> list[tuple[float, str]]:

  found = []

  class Recorder(logging.Handler):
    """Records log messages."""

    def emit(self, record):
      found.append((record.created, record.getMessage()))

  absl_logging.get_absl_logger().addHandler(Recorder(logging.WARNING))
  return found


def lost_steps(run: Run) -> int:
  """Returns the number of lost steps according to the log."""
  counts = [
    int(found[1])
    for _, message in run.logged
    if (found := re.search(r'Lost: (\d+) steps', message))
  ]
  return sum(counts)


def pause(tensor, milliseconds: int = 50):
  """Returns the same tensor after a delay."""

  # A data set waits without using the CPU, which other tasks need.
  signature = {'output_types': [tensor.dtype], 'output_shapes': [tensor.shape]}
  variant = tf.raw_ops.TakeDataset(
    input_dataset=tf.raw_ops.SleepDataset(
      input_dataset=tf.data.experimental.to_variant(
        tf.data.Dataset.from_tensors(tensor)
      ),
      sleep_microseconds=tf.constant(1000 * milliseconds, tf.int64),
      **signature,
    ),
    count=1,
    **signature,
  )
  return tf.raw_ops.DatasetToSingleElement(dataset=variant, **signature)[0]


def check_shared(strategy) -> None:
  """Checks that synchronous workers left shares of a batch in slots."""
  assert not runner.shares_batches(strategy) or runner.shares_rows(strategy)


def take_short_steps(progress_path: str, steps: int, mode: str) -> int:
  """Runs the shortest possible steps, and reports every hundredth.

  Returns:
    The number of steps that the optimizer counted.
  """
  strategy = tfs.ParameterServerStrategy(mode=mode)
  with strategy.scope():
    weight = tf.Variable(tf.zeros([10]))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])

  def step(batch):
    optimizer.apply([tf.reduce_mean(batch) * tf.ones([10])], [weight])
    return tf.reduce_mean(batch)

  train = strategy.step(step, [optimizer])
  for taken in range(1, steps + 1):
    train(np.ones([4], np.float32))
    if taken % 100 == 0:
      write_number(progress_path, taken)
  strategy.join()
  check_shared(strategy)
  return int(optimizer.iterations.numpy())
