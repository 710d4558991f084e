"""What one process measures: options, numbers, files, and `fit` with them."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_strategies as tfs
from tests import virtual_devices
from tf_strategies.monitoring import (
  input_watch,
  keras_callback,
  merge,
  recorder,
  training_monitor,
)

virtual_devices.configure()


def _read_lines(path):
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f]


_PAUSE_SECONDS = 0.05


class OptionsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('every', {'metrics_every_steps': 0}, 'metrics_every_steps=0'),
    ('events', {'timeline_events': 0}, 'timeline_events=0'),
    ('nan', {'progress_seconds': float('nan')}, 'progress_seconds=nan'),
    ('order', {'profile_steps': (5, 4), 'log_dir': 'a'}, 'profile_steps=.5, 4'),
    ('zero', {'profile_steps': (0, 4), 'log_dir': 'a'}, 'profile_steps=.0, 4'),
    ('no_pair', {'profile_steps': 3, 'log_dir': 'a'}, 'profile_steps=3'),
    ('text', {'global_batch_size': '4'}, "global_batch_size='4'"),
    ('no_rows', {'global_batch_size': 0}, 'global_batch_size=0'),
    ('no_path', {'log_dir': 3}, 'log_dir=3'),
    ('no_dir', {'profile_steps': (1, 4)}, 'profile_steps without log_dir'),
  )
  def test_refused(self, options, message):
    with self.assertRaisesRegex(tfs.errors.UnsupportedOptionError, message):
      training_monitor.MonitorOptions(**options)

  def test_paths_name_the_rank(self):
    options = training_monitor.MonitorOptions(
      log_dir='logs', timeline='a/run.{rank}.json'
    )
    self.assertEqual(options.path('timeline', 3), 'a/run.3.json')
    self.assertEqual(
      options.path('timeline', 3, 2), 'a/run.3-generation-2.json'
    )
    self.assertEqual(options.path('metrics', 3), 'logs/metrics-3.jsonl')
    options = training_monitor.MonitorOptions(metrics_jsonl='a/m.jsonl')
    self.assertEqual(options.path('metrics', 1), 'a/m-1.jsonl')
    for kind in ('timeline', 'tensorboard'):
      self.assertIsNone(options.path(kind, 0))

  def test_steps_of_a_flag(self):
    self.assertEqual(training_monitor.parse_steps('3,5'), (3, 5))
    self.assertEqual(training_monitor.parse_steps(['3', '5']), (3, 5))
    self.assertIsNone(training_monitor.parse_steps(None))
    for text in ('3', '3,x', '1,2,3'):
      with self.assertRaises(tfs.errors.UnsupportedOptionError):
        training_monitor.parse_steps(text)

  def test_callback_has_the_options_of_a_monitor(self):
    taken = inspect.signature(keras_callback.MonitorCallback).parameters
    self.assertEqual(
      {n: p.default for n, p in taken.items() if n != 'monitor'},
      {
        field.name: field.default
        for field in dataclasses.fields(training_monitor.MonitorOptions)
      },
    )

  def test_callback_refuses_options_beside_a_monitor(self):
    monitor = training_monitor.TrainingMonitor()
    self.addCleanup(monitor.close)
    with self.assertRaisesRegex(
      tfs.errors.UnsupportedOptionError, "timeline='a'.*leave out one"
    ):
      keras_callback.MonitorCallback(monitor, timeline='a')


class MonitorTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._directory = self.create_tempdir().full_path

  def _monitor(self, **options):
    monitor = training_monitor.TrainingMonitor(
      training_monitor.MonitorOptions(**options)
    )
    self.addCleanup(monitor.close)
    return monitor

  def _path(self, name):
    return os.path.join(self._directory, name)

  def _fit(self, strategy, callback, epochs=1, rows=24, **compile_options):
    with strategy.scope():
      model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
      model.compile(
        tfs.keras.DistributedOptimizer('sgd'),
        'mse',
        jit_compile=False,
        **compile_options,
      )
    x = np.ones([rows, 3], np.float32)
    if epochs:
      model.fit(
        x,
        x[:, :2],
        batch_size=8,
        epochs=epochs,
        verbose=0,
        callbacks=[callback],
      )
    return model

  def test_loop_of_ones_own(self):
    monitor = self._monitor(
      metrics_jsonl=self._path('m.jsonl'),
      timeline=self._path('t.json'),
      metrics_every_steps=2,
    )
    dataset = input_watch.watch(tf.data.Dataset.range(20).batch(4))
    monitor.start(first_step=10)
    iterator = iter(dataset)
    for _ in range(5):
      with monitor.step(), recorder.span('my own', 'mine'):
        next(iterator)
    monitor.close()
    self.assertFalse(recorder.is_on())
    lines = _read_lines(self._path('m-0.jsonl'))
    self.assertEqual(
      [(n['step'], n['steps']) for n in lines],
      [
        (12, 2),
        (14, 2),
        (15, 1),
      ],
    )
    self.assertEqual([n['examples'] for n in lines], [8, 8, 4])
    self.assertIsNone(lines[0]['bytes_sent'])
    trace = merge.load(self._path('t-0.json'))
    mine = [e for e in trace['traceEvents'] if e['name'] == 'my own']
    self.assertEqual([e['args']['step'] for e in mine], [*range(11, 16)])

  @pytest.mark.full
  def test_fit_on_two_replicas(self):
    strategy = tfs.RingMirroredStrategy(devices=['CPU:0', 'CPU:1'])
    callback = keras_callback.MonitorCallback(log_dir=self._path('logs'))
    # 8, 8 and 4 rows.
    self._fit(strategy, callback, epochs=2, rows=20)
    lines = _read_lines(self._path('logs/metrics-0.jsonl'))
    self.assertEqual([n['step'] for n in lines], [*range(1, 7)])
    self.assertEqual([n['examples'] for n in lines], [8, 8, 4] * 2)
    self.assertEqual([n['global_examples'] for n in lines], [8, 8, 4] * 2)
    for line in lines:
      self.assertGreater(line['input_share'], 0.0)
      self.assertIsNone(line['communication_share'])  # Inside of the graph.
      self.assertAlmostEqual(line['input_share'] + line['compute_share'], 1.0)
    self.assertFalse(recorder.is_on())

  @pytest.mark.full
  def test_several_steps_in_one_call(self):
    strategy = tfs.RingMirroredStrategy(devices=['CPU:0', 'CPU:1'])
    callback = keras_callback.MonitorCallback(
      metrics_jsonl=self._path('m.jsonl')
    )
    self._fit(strategy, callback, rows=48, steps_per_execution=3)
    lines = _read_lines(self._path('m-0.jsonl'))
    self.assertEqual([(n['step'], n['steps']) for n in lines], [(3, 3), (6, 3)])
    self.assertEqual([n['examples'] for n in lines], [24, 24])

  @pytest.mark.full
  def test_steps_go_on_where_the_optimizer_is(self):
    strategy = tfs.RingMirroredStrategy(devices=['CPU:0'])
    model = self._fit(strategy, keras.callbacks.Callback())
    callback = keras_callback.MonitorCallback(
      metrics_jsonl=self._path('m.jsonl')
    )
    x = np.ones([16, 3], np.float32)
    model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[callback])
    lines = _read_lines(self._path('m-0.jsonl'))
    self.assertEqual([n['step'] for n in lines], [4, 5])

  @pytest.mark.full
  def test_steps_that_were_done_before_are_none(self):
    dataset = tf.data.Dataset.from_tensors((np.ones([8, 3]), np.ones([8, 2])))
    lines = []
    for steps in (4, 6):  # As if it was interrupted after 4 of 6 steps.
      keras.utils.clear_session()  # Another process gives the same names.
      model = self._fit(tfs.RingMirroredStrategy(['CPU:0']), None, epochs=0)
      checkpoint = tfs.RunCheckpoint(self._path('checkpoints'), model)
      epoch, step = checkpoint.restore()
      self.assertEqual(step, len(lines))
      model.fit(
        dataset.repeat(6),
        initial_epoch=epoch,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=[
          keras_callback.MonitorCallback(metrics_jsonl=self._path('m.jsonl')),
          tfs.PreemptionCheckpoint(checkpoint, save_each_epoch=False),
        ],
      )
      checkpoint.save(0, steps)
      lines = _read_lines(self._path('m-0.jsonl'))
    self.assertEqual([n['step'] for n in lines], [*range(1, 7)])

  def test_input_that_is_not_seen(self):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile('sgd', 'mse', jit_compile=False)
    callback = keras_callback.MonitorCallback(
      metrics_jsonl=self._path('m.jsonl'), global_batch_size=8
    )
    x = np.ones([16, 3], np.float32)
    model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[callback])
    lines = _read_lines(self._path('m-0.jsonl'))
    self.assertLen(lines, 2)
    for line in lines:
      self.assertIsNone(line['input_share'])
      self.assertAlmostEqual(
        line['global_examples_per_second'] * line['step_seconds'], 8
      )

  def test_progress_on_the_chief_alone(self):
    class Second:
      rank, num_workers = 1, 2

    for strategy, expected in ((None, 2), (Second(), 0)):
      monitor = self._monitor(progress_seconds=1e-9, global_batch_size=6)
      monitor.start(strategy)
      with contextlib.redirect_stdout(io.StringIO()) as shown:
        for _ in range(3):
          with monitor.step():
            pass
      monitor.close()
      # The first step, which traces, is in none.
      lines = shown.getvalue().splitlines()
      self.assertLen(lines, expected)
      for line in lines:
        self.assertRegex(line, r'^step \d: .* ms, [\d,]+ examples/s .* MB RSS$')
    self.assertEmpty(os.listdir(self._directory))

  def test_line_is_in_the_file_at_once(self):
    monitor = self._monitor(metrics_jsonl=self._path('m.jsonl'))
    monitor.start()
    for number in range(3):
      with monitor.step():
        pass
      self.assertLen(_read_lines(self._path('m-0.jsonl')), number + 1)

  def test_new_monitor_closes_the_last(self):
    first = self._monitor(metrics_jsonl=self._path('m.jsonl'))
    first.start()
    with first.step():
      pass
    second = self._monitor()
    with first.step():
      pass
    second.close()
    self.assertLen(_read_lines(self._path('m-0.jsonl')), 1)
    self.assertFalse(recorder.is_on())

  def test_steps_to_profile_that_never_came(self):
    monitor = self._monitor(log_dir=self._path('logs'), profile_steps=(5, 6))
    monitor.start()
    with monitor.step():
      pass
    with self.assertLogs('absl', 'WARNING') as logged:
      monitor.close()
    self.assertRegex(logged.output[0], r'profile_steps=.5, 6.*did 1 steps')

  def test_summaries_for_tensorboard(self):
    from tensorboard.backend.event_processing import event_accumulator

    monitor = self._monitor(log_dir=self._path('logs'), global_batch_size=4)
    monitor.start(first_step=10)
    for _ in range(3):  # Within a second: the first and the last are written.
      with monitor.step():
        pass
    monitor.close()
    lines = _read_lines(self._path('logs/metrics-0.jsonl'))
    found = event_accumulator.EventAccumulator(self._path('logs/rank-0'))
    tags = found.Reload().Tags()['tensors']
    self.assertNotIn('monitoring/bytes_sent', tags)  # Nobody sends.
    for name in ('global_examples_per_second', 'step_seconds'):
      events = found.Tensors(f'monitoring/{name}')
      values = [float(tf.make_ndarray(e.tensor_proto)) for e in events]
      self.assertEqual([e.step for e in events], [11, 13])
      self.assertAllClose(values, [lines[i][name] for i in (0, 2)])
      kind = found.SummaryMetadata(f'monitoring/{name}').plugin_data
      self.assertEqual(kind.plugin_name, 'scalars')

  def test_progress_bar_shows_means_of_the_epoch(self):
    monitor = keras_callback.MonitorCallback(
      metrics_jsonl=self._path('m.jsonl'),
      global_batch_size=8,
      progress_seconds=0,
    )
    shown = []

    def end(batch, logs):
      shown.append(dict(logs))
      time.sleep(_PAUSE_SECONDS)

    bar = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile('sgd', 'mse', jit_compile=False)
    x = np.ones([24, 3], np.float32)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      history = model.fit(
        x, x[:, :2], batch_size=8, epochs=2, callbacks=[monitor, bar]
      )
    self.assertRegex(printed.getvalue(), r' - examples/s: [1-9]\d*\.\d+')
    self.assertNotIn('communication', printed.getvalue())  # Nobody sends.
    self.assertEqual(set(history.history), {'loss'})
    seconds = [n['step_seconds'] for n in _read_lines(self._path('m-0.jsonl'))]
    self.assertNotIn('examples/s', shown[0])  # It traces.
    for first, last, pauses in (
      *((1, 1, 1), (1, 2, 2)),
      *((3, 3, 0), (3, 4, 1), (3, 5, 2)),
    ):
      # The time between steps counts too.
      steps = seconds[first : last + 1]
      least = sum(steps) + pauses * _PAUSE_SECONDS
      spent = 8 * len(steps) / shown[last]['examples/s']
      self.assertBetween(spent, least, least + 1)
    # The monitor was for that `fit`.
    model.fit(x, x[:, :2], verbose=0, callbacks=[monitor, bar])
    self.assertEqual(set(shown[-1]), {'loss'})

  def test_off_leaves_the_pipeline_as_it_is(self):
    dataset = tf.data.Dataset.range(3)
    self.assertIs(input_watch.watch(dataset), dataset)

  def test_waiting_is_in_the_events(self):
    def sleep(number):
      time.sleep(0.05)
      return number

    def slow(x):
      return tf.numpy_function(sleep, [x], tf.int64)

    events = []
    with recorder.listening(events):
      for _ in input_watch.watch(tf.data.Dataset.range(3).map(slow).batch(1)):
        pass
    self.assertLen(events, 3)
    # The sleep is in it; the clocks agree to a millisecond. Those after it may
    # have begun before they were asked for.
    self.assertGreater(events[0].end_ns - events[0].begin_ns, 49e6)


if __name__ == '__main__':
  tf.test.main()
