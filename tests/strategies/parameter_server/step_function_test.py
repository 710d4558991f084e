"""When the steps that Keras begins one by one may be followed by a save."""

import contextlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tf_strategies import _keras_internal
from tf_strategies.strategies.parameter_server import training


class StepFunctionTest(tf.test.TestCase):
  def test_no_save_in_the_middle_of_a_group(self):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile('sgd', 'mse', steps_per_execution=3, jit_compile=False)
    strategy = mock.Mock(scope=contextlib.nullcontext)
    spec = tf.TensorSpec([], tf.float32)
    strategy.engine.discover.return_value.outputs = spec
    strategy.begin.return_value = np.float32(0.5)
    keras_step = mock.Mock(spec=_keras_internal.KerasStep)
    keras_step.model, keras_step.kind = model, 'train'
    keras_step.run = model.train_step
    function = training.StepFunction(strategy, keras_step)
    step = tf.function(function.in_graph)
    for _ in range(4):
      step(tf.ones([2, 3]))
    function(iter([np.ones([2, 3], np.float32)] * 3))
    function(iter([np.ones([2, 3], np.float32)] * 2))
    may_save = [call.args[3] for call in strategy.begin.call_args_list]
    self.assertEqual(may_save, [False, False, True, False, True, False])


if __name__ == '__main__':
  tf.test.main()
