"""A gradient of `fit` passes through few files on its way to the network and back.

The test counts the package's files whose functions receive the gradient as a
tensor, an array or a buffer. It counts while `fit` traces its step, in the
optimizer's `apply` and in the exchanges between replicas, and while the step runs,
in the functions that the exchange of the gradients calls on the host. It does not
count the planner, which sees operations and no gradient.
"""

import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import processes, virtual_devices
from tf_strategies.spmd import emit

# Lower these limits when a file no longer handles gradients. The second one counts the
# files between the exchange of the step and the network.
_MOST_FILES, _MOST_TO_NETWORK = 10, 7
_TO_NETWORK = ('cross_device', 'process_group', 'strategies/multi_worker')

# The gradient has 220 elements, and a chunk of it has half of them. No other tensor of
# the step has more than 88.
_INPUTS, _OUTPUTS, _FEWEST = 22, 10, 100


def _holds_gradient(value, depth=0) -> bool:
  """Returns whether an argument is a gradient, a piece of one, or contains one."""
  if isinstance(value, tf.Tensor):
    count = value.shape.num_elements()
    return count is None or count >= _FEWEST
  if isinstance(value, np.ndarray):
    return value.size >= _FEWEST
  if isinstance(value, memoryview):
    return value.nbytes >= 4 * _FEWEST
  if isinstance(value, tf.distribute.DistributedValues):
    is_variable = isinstance(value, tf.Variable)
    return not is_variable and _holds_gradient(value.values, depth)
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

  def watch(self, owner, name):
    """Records the calls that a method makes."""
    method = getattr(owner, name)

    def watched(*args):
      self.is_on = True
      result = method(*args)
      self.is_on = False
      return result

    setattr(owner, name, watched)

  def start(self):
    """Watches this thread, the threads that it starts, and host calls of graphs."""
    numpy_function = tf.numpy_function

    def watched(fn, *args, **kwargs):
      if not self.is_on:  # This call moves no gradient.
        return numpy_function(fn, *args, **kwargs)

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
      [keras.Input([_INPUTS]), keras.layers.Dense(_OUTPUTS, use_bias=False)]
    )
    model.compile(keras.optimizers.SGD(0.75 * _OUTPUTS / _INPUTS), 'mse')
  recorder.watch(model.optimizer, 'apply')
  recorder.watch(emit.Emitter, '_meet')
  x, before = np.ones([4, _INPUTS], np.float32), model.get_weights()[0]
  options = {'batch_size': 4, 'verbose': 0}
  model.fit(x, x[:, :_OUTPUTS], epochs=2, **options)
  sys.setprofile(None)  # From here on, only host calls are watched.
  recorder.is_on = True
  model.fit(x, x[:, :_OUTPUTS], **options)
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
      found = [f for f in files if f.startswith(_TO_NETWORK)]
      self.assertLessEqual(len(found), _MOST_TO_NETWORK, '\n'.join(found))
      # The error of each output is e. Each step subtracts 3 e / 2 from it.
      error = before.sum(0) - 1
      self.assertAllClose(after.sum(0) - 1, error * (-0.5) ** 3)


if __name__ == '__main__':
  tf.test.main()
