"""Measurements and timelines of one process, with `fit` and with a custom loop."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_strategies as tfs
from tests import tf_case, virtual_devices
from tf_strategies.monitoring import (
  input_watch,
  keras_callback,
  recorder,
  training_monitor,
)

virtual_devices.configure()

_PAUSE_SECONDS = 0.05


class MonitorTest(tf_case.TestCase):
  def _monitor(self, timeline=None):
    monitor = training_monitor.TrainingMonitor(timeline)
    self.addCleanup(monitor.close)
    return monitor

  def _trace(self, name):
    """Returns the events of a timeline."""
    with open(self.path(name), encoding='utf-8') as file:
      return json.load(file)['traceEvents']

  def _steps(self, name='t-0.json'):
    """Returns the step events of a timeline."""
    return [e for e in self._trace(name) if e.get('cat') == recorder.STEP]

  def _fit(self, strategy, callback, epochs=1, rows=24, **compile_options):
    with strategy.scope():
      model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
      model.compile(
        'sgd',
        'mse',
        jit_compile=False,
        **compile_options,
      )
    x = np.ones([rows, 3], np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)
    dataset = dataset.map(lambda x, y: (x, y, None))
    if epochs:
      model.fit(dataset, epochs=epochs, verbose=0, callbacks=[callback])
    return model

  def test_custom_loop(self):
    monitor = self._monitor(self.path('t.json'))
    dataset = input_watch.watch(tf.data.Dataset.range(20).batch(4))
    monitor.start(first_step=10)
    iterator = iter(dataset)
    for number in range(5):
      with monitor.step(), recorder.span('my own', 'mine'):
        next(iterator)
      # The first step, which traces the graph, is not counted.
      self.assertEqual(set(monitor.logs()), {'examples/s'} if number else set())
    monitor.close()
    recorder.add('after', 'mine', 1, 2)
    trace = self._trace('t-0.json')
    mine = [e for e in trace if e.get('cat') == 'mine']
    self.assertEqual([e['args']['step'] for e in mine], [*range(11, 16)])
    self.assertLen([e for e in trace if e.get('cat') == 'input'], 5)

  @pytest.mark.smoke
  def test_step_numbers_continue_from_the_optimizer(self):
    strategy = tfs.RingMirroredStrategy(devices=['CPU:0', 'CPU:1'])
    model = self._fit(strategy, keras.callbacks.Callback())
    model.steps_per_execution = 2
    model.train_function = None
    callback = keras_callback.MonitorCallback(self.path('t.json'))
    x = np.ones([32, 3], np.float32)
    model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[callback])
    self.assertEqual(
      [(e['name'], e['args']['steps']) for e in self._steps()],
      [('2 steps to 5', 2), ('2 steps to 7', 2)],
    )
    self.assertFalse(recorder.is_on())

  def test_steps_before_a_resume_are_not_recorded_again(self):
    dataset = tf.data.Dataset.from_tensors((np.ones([8, 3]), np.ones([8, 2])))
    numbers = []
    for steps in (4, 6):  # The first turn ends after 4 of 6 steps.
      keras.utils.clear_session()  # Another process would use the same names.
      model = self._fit(tfs.RingMirroredStrategy(['CPU:0']), None, epochs=0)
      run = tfs.Run(self.path('checkpoints'), model)
      epoch, step = run.restore()
      self.assertEqual(step, len(numbers))
      model.fit(
        dataset.repeat(6),
        initial_epoch=epoch,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=[
          keras_callback.MonitorCallback(self.path('t.json')),
          run,
        ],
      )
      run.save(0, steps)
      numbers += [e['args']['step'] for e in self._steps()]
    self.assertEqual(numbers, [*range(1, 7)])


if __name__ == '__main__':
  tf.test.main()
