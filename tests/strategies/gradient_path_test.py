"""A gradient of `fit` passes through few files on its way to the network and back.

The test counts the package's files whose functions receive the gradient as a
tensor, an array or a buffer. It counts while the step is traced and while it
runs.
"""

import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices
from tf_strategies.strategies.multi_worker import worker_exchange

# Lower this limit when a file no longer handles gradients.
_MOST_FILES = 10

_TENSORS = (tf.Tensor, tf.IndexedSlices, tf.distribute.DistributedValues)


def _holds_gradient(value, depth=0) -> bool:
  """Returns whether an argument is a gradient or contains one."""
  if isinstance(value, _TENSORS):
    return not isinstance(value, tf.Variable)
  if isinstance(value, np.ndarray):
    return value.ndim > 0
  if isinstance(value, memoryview):
    return True
  if depth == 3 or not isinstance(value, list | tuple | dict):
    return False
  parts = value.values() if isinstance(value, dict) else value
  return any(_holds_gradient(part, depth + 1) for part in parts)


class _Recorder:
  """Records the package's files whose functions receive a gradient."""

  def __init__(self):
    self.files = set()
    self.is_on = False

  def profile(self, frame, event, arg):
    """Records the file of a called function. `sys.setprofile` calls this method."""
    del arg
    path = frame.f_code.co_filename
    if not self.is_on or event != 'call' or '/tf_strategies/' not in path:
      return
    if threading.current_thread().name.startswith('process_group'):
      return  # This thread of the control links sends heartbeats.
    if any(map(_holds_gradient, frame.f_locals.values())):
      self.files.add(path.rpartition('/tf_strategies/')[2])

  def start(self):
    """Watches this thread, the threads that it starts, and host calls of graphs."""
    numpy_function = tf.numpy_function

    def watched(fn, *args, **kwargs):
      def host(*values):
        sys.setprofile(self.profile)
        return fn(*values)

      return numpy_function(host, *args, **kwargs)

    tf.numpy_function = watched
    threading.setprofile(self.profile)
    sys.setprofile(self.profile)


def _train(rank):
  del rank
  virtual_devices.configure(1)
  recorder = _Recorder()
  recorder.start()
  strategy = tfs.MultiWorkerRingStrategy(devices=[virtual_devices.name(0)])
  with strategy.scope():
    model = keras.Sequential(
      [keras.Input([3]), keras.layers.Dense(2, use_bias=False)]
    )
    model.compile(keras.optimizers.SGD(0.5), 'mse')
  add = worker_exchange.WorkerExchange.add

  def watched_add(self, columns, sites, variables):
    recorder.is_on = any(variables)
    recorder.files.add('strategies/multi_worker/worker_exchange.py')
    sums = add(self, columns, sites, variables)
    recorder.is_on = False
    return sums

  worker_exchange.WorkerExchange.add = watched_add
  x, before = np.ones([4, 3], np.float32), model.get_weights()[0]
  for _ in range(2):  # Keras traces twice.
    model.train_on_batch(x, x[:, :2])
  sys.setprofile(None)  # From here on, only host calls are watched.
  recorder.is_on = True
  model.train_on_batch(x, x[:, :2])
  recorder.is_on = False
  report = strategy.communication_report()
  strategy.close()
  return sorted(recorder.files), before, model.get_weights()[0], report


class GradientPathTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_path_is_short(self):
    results = processes.run_workers(_train, 2)
    for rank, (files, before, after, report) in enumerate(results):
      self.assertEqual(report['paths'], {1 - rank: 'memory'})
      self.assertIn(
        'strategies/multi_worker/process_group_communicator.py', files
      )
      self.assertTrue(any('process_group/tcp' in f for f in files), files)
      self.assertLessEqual(len(files), _MOST_FILES, '\n'.join(files))
      # The error of each output is e. Each step subtracts 3 e / 2 from it.
      error = before.sum(0) - 1
      self.assertAllClose(after.sum(0) - 1, error * (-0.5) ** 3)


if __name__ == '__main__':
  tf.test.main()
