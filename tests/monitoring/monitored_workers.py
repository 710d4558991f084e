"""The training program of the workers in workers_test.py."""

import os
import time

import keras
import numpy as np

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies import process_group
from tf_strategies.monitoring import keras_callback, recorder

virtual_devices.configure()

STEPS_PER_EPOCH, EPOCHS, GLOBAL_BATCH_SIZE = 4, 2, 32
# Each kernel fills one bucket.
UNITS, LAYERS = 160, 4
BUCKET_BYTES = 100_000
# Minimum duration of a bucket, which the graph starts earlier.
BUCKET_SECONDS = 0.02


def _strategy():
  return tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(
      bucket_bytes=BUCKET_BYTES,
      group=process_group.GroupOptions.from_env(
        rendezvous_timeout_seconds=90.0, heartbeat_timeout_seconds=60.0
      ),
    ),
    devices=['CPU:0'],
  )


def _model(strategy):
  with strategy.scope():
    model = keras.Sequential(
      [keras.Input([UNITS])]
      + [keras.layers.Dense(UNITS) for _ in range(LAYERS)]
    )
    model.compile(
      keras.optimizers.SGD(1e-3),
      'mse',
      jit_compile=False,
    )
  return model


def _fit(model, epochs, steps, callbacks):
  count = GLOBAL_BATCH_SIZE * steps
  x = np.linspace(0, 1, count * UNITS, dtype=np.float32).reshape([count, UNITS])
  model.fit(
    x,
    x,
    batch_size=GLOBAL_BATCH_SIZE,
    epochs=epochs,
    verbose=0,
    callbacks=callbacks,
  )


def _slow_down(group):
  real = group.all_reduce

  def all_reduce(*args, **options):
    time.sleep(BUCKET_SECONDS)
    return real(*args, **options)

  group.all_reduce = all_reduce


def measure(rank, directory):
  """Trains without a monitor, then with one."""
  strategy = _strategy()
  model = _model(strategy)
  _fit(model, 1, 2, [])
  was_off = not recorder.is_on() and not os.listdir(directory)
  strategy.process_group.barrier()
  _slow_down(strategy.process_group)
  model = _model(strategy)
  monitor = keras_callback.MonitorCallback(os.path.join(directory, 'run.json'))
  told = []
  bar = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: told.append(dict(logs))
  )
  _fit(model, EPOCHS, STEPS_PER_EPOCH, [monitor, bar])
  strategy.process_group.barrier()
  strategy.close()
  return {
    'was_off': was_off,
    'is_off': not recorder.is_on(),
    'parameters': model.count_params(),
    'variables': [v.path for v in model.trainable_variables],
    'metric_values': sum(
      int(np.prod(v.shape)) for v in model.metrics_variables
    ),
    'logs': told,
  }
