"""`compression` rounds all gradients, and nothing else."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices

virtual_devices.configure()

_BATCH, _STEPS, _UNITS = 37, 3, 12
# Sums over this many rows need more than bfloat16's 8 bits.
_ROWS = _BATCH * _STEPS


def _model(strategy):
  keras.utils.set_random_seed(1)
  with strategy.scope():
    model = keras.Sequential(
      [keras.Input([_UNITS]), keras.layers.Dense(_UNITS)]
    )
    # The simplest update: one weight, one gradient, and a learning rate of
    # zero.
    model.compile(keras.optimizers.SGD(0.0), 'mse', metrics=['mae'])
  return model


def _data():
  x = np.random.default_rng(0).normal(size=[_ROWS, _UNITS])
  return x.astype(np.float32)


def _fit(strategy):
  """Returns the reports of `fit` for each step and in total, and the bytes of a
  step.
  """
  model, x = _model(strategy), _data()
  logs, sent = [], []

  def note(batch, logs_of_batch):
    del batch
    logs.append({k: float(v) for k, v in logs_of_batch.items()})
    sent.append(strategy.process_group.bytes_sent)

  callback = keras.callbacks.Callback()
  callback.on_train_batch_end = lambda batch, logs=None: note(batch, logs)
  history = model.fit(
    x, x, batch_size=_BATCH, verbose=0, callbacks=[callback]
  ).history
  metric_values = sum(int(np.prod(v.shape)) for v in model.metrics_variables)
  return {
    'reported': (logs, history, model.evaluate(x, x, _BATCH, verbose=0)),
    'bytes': np.diff(sent).tolist(),
    'gradients': model.count_params(),
    'others': metric_values,
  }


def _work(rank):
  del rank
  found = {}
  for compression in ('none', 'bfloat16'):
    strategy = tfs.MultiWorkerRingStrategy(
      options=tfs.RingOptions(compression=compression),
      devices=[virtual_devices.name(0)],
    )
    found[compression] = _fit(strategy)
    strategy.close()
  return found


@functools.cache
def _results():
  return processes.run_workers(_work, 2)


class CompressionTest(tf.test.TestCase):
  def test_what_is_reported_is_not_rounded(self):
    for found in _results():
      exact, rounded = found['none'], found['bfloat16']
      self.assertEqual(exact['reported'], rounded['reported'])

  def test_gradients_are_half_as_long(self):
    for found in _results():
      for compression, size in (('none', 4), ('bfloat16', 2)):
        told = found[compression]
        # 2 (N - 1) / N, with N = 2.
        want = size * told['gradients'] + 4 * told['others']
        self.assertEqual(set(told['bytes']), {want}, compression)


if __name__ == '__main__':
  tf.test.main()
