"""A gradient's way from `apply` to the wire and back touches few files.

Counted while a step is traced and run: the files of the package of which a
function is called with the gradient, as a tensor, an array or a buffer, until
the inner optimizer has it.
"""

import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices
from tf_strategies.keras import distributed_optimizer

# Lower this bound with each file that goes.
_MOST_FILES = 10

_TENSORS = (tf.Tensor, tf.IndexedSlices, tf.distribute.DistributedValues)


def _holds_gradient(value, depth=0) -> bool:
  """Whether an argument is a gradient, or has one inside."""
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
  """Notes the package's files whose functions get a gradient."""

  def __init__(self):
    self.files = set()
    self.is_on = False

  def profile(self, frame, event, arg):
    """What `sys.setprofile` calls."""
    del arg
    path = frame.f_code.co_filename
    if not self.is_on or event != 'call' or '/tf_strategies/' not in path:
      return
    if threading.current_thread().name.startswith('process_group'):
      return  # The thread of the control links, which sends heartbeats.
    if any(map(_holds_gradient, frame.f_locals.values())):
      self.files.add(path.rpartition('/tf_strategies/')[2])

  def start(self):
    """Watches this thread, those it starts, and host calls of graphs."""
    numpy_function = tf.numpy_function

    def watched(fn, *args, **kwargs):
      def host(*values):
        sys.setprofile(self.profile)
        return fn(*values)

      return numpy_function(host, *args, **kwargs)

    tf.numpy_function = watched
    threading.setprofile(self.profile)
    sys.setprofile(self.profile)


class WatchedOptimizer(keras.optimizers.SGD):
  """Ends the way: what it does with a reduced gradient is Keras's."""

  recorder: _Recorder | None = None

  def apply(self, grads, trainable_variables=None):
    """Updates, unwatched."""
    self.recorder.is_on = False
    super().apply(grads, trainable_variables)


def _train(rank):
  del rank
  virtual_devices.configure(2)
  recorder = _Recorder()
  recorder.start()
  strategy = tfs.MultiWorkerRingStrategy(
    devices=[virtual_devices.name(0), virtual_devices.name(1)]
  )
  with strategy.scope():
    variables = [tf.Variable(tf.ones([5])), tf.Variable(tf.ones([3, 2]))]
    inner = WatchedOptimizer(0.1)
    inner.recorder = recorder
    optimizer = tfs.keras.DistributedOptimizer(inner)
    optimizer.build(variables)
  apply = distributed_optimizer.DistributedOptimizer.apply

  def watched_apply(self, *args, **kwargs):
    recorder.is_on = True
    return apply(self, *args, **kwargs)

  distributed_optimizer.DistributedOptimizer.apply = watched_apply

  @tf.function
  def step():
    def replica_step():
      optimizer.apply([v * 1.0 for v in variables], variables)

    strategy.run(replica_step)

  step()
  recorder.is_on = True
  step()
  recorder.is_on = False
  values = [v.numpy() for v in variables]
  report = strategy.communication_report()
  strategy.close()
  return sorted(recorder.files), values, report


class GradientPathTest(tf.test.TestCase):
  @pytest.mark.smoke
  def test_path_is_short(self):
    results = processes.run_workers(_train, 2)
    for rank, (files, values, report) in enumerate(results):
      self.assertEqual(report['paths'], {1 - rank: 'memory'})
      self.assertIn('keras/distributed_optimizer.py', files)
      self.assertIn(
        'strategies/multi_worker/process_group_communicator.py', files
      )
      self.assertTrue(any('process_group/tcp' in f for f in files), files)
      self.assertLessEqual(len(files), _MOST_FILES, '\n'.join(files))
      # Two steps of SGD on the sum of four replicas' gradients.
      self.assertAllClose(values[0], np.full([5], 0.6**2))


if __name__ == '__main__':
  tf.test.main()
