"""Measurements and timelines of two real workers."""

import collections
import glob
import json
import os
import pathlib
import tempfile
import time

import keras
import numpy as np
from absl.testing import absltest

import tf_strategies as tfs
from tests import processes, virtual_devices
from tf_strategies import process_group
from tf_strategies.monitoring import keras_callback, recorder, timeline

virtual_devices.configure()

STEPS_PER_EPOCH, EPOCHS, GLOBAL_BATCH_SIZE = 4, 2, 32
# Each kernel fills one bucket.
UNITS, LAYERS = 160, 4
BUCKET_BYTES = 100_000
# Minimum duration of a bucket, which the graph starts earlier.
BUCKET_SECONDS = 0.02


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


def measure(rank, directory):
  """Trains without a monitor, then with one."""
  strategy = tfs.MultiWorkerRingStrategy(
    options=tfs.RingOptions(
      bucket_bytes=BUCKET_BYTES,
      group=process_group.GroupOptions.from_env(
        rendezvous_timeout_seconds=90.0, heartbeat_timeout_seconds=60.0
      ),
    ),
    devices=['CPU:0'],
  )
  model = _model(strategy)
  _fit(model, 1, 2, [])
  was_off = not recorder.is_on() and not os.listdir(directory)
  strategy.process_group.barrier()
  all_reduce = strategy.process_group.all_reduce

  def slow_all_reduce(*args, **options):
    time.sleep(BUCKET_SECONDS)
    return all_reduce(*args, **options)

  strategy.process_group.all_reduce = slow_all_reduce
  model = _model(strategy)
  monitor = keras_callback.MonitorCallback(os.path.join(directory, 'run.json'))
  logs_of_steps = []
  bar = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: logs_of_steps.append(dict(logs))
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
    'logs': logs_of_steps,
  }


_STEPS = EPOCHS * STEPS_PER_EPOCH
# Times are stored as floats of microseconds.
_ROUNDING_US = 0.01


def _spans(trace, lane, category=None):
  return [
    e
    for e in trace['traceEvents']
    if e['ph'] == 'X'
    and timeline.LANES[e['tid']] == lane
    and category in (None, e['cat'])
  ]


def _is_inside(inner, outer):
  return (
    inner['ts'] >= outer['ts'] - _ROUNDING_US
    and inner['ts'] + inner['dur'] <= outer['ts'] + outer['dur'] + _ROUNDING_US
  )


class MeasuredRunTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    with tempfile.TemporaryDirectory() as directory:
      cls.results = processes.run_workers(measure, 2, args=(directory,))
      cls.files = sorted(
        os.path.relpath(path, directory)
        for path in glob.glob(f'{directory}/**', recursive=True)
        if os.path.isfile(path)
      )
      cls.traces = [
        json.loads(pathlib.Path(directory, f'run-{rank}.json').read_text())
        for rank in range(2)
      ]

  def test_files_are_written_only_with_a_monitor(self):
    self.assertEqual(self.files, ['run-0.json', 'run-1.json'])
    for result in self.results:
      self.assertTrue(result['was_off'])
      self.assertTrue(result['is_off'])

  def test_bytes_equal_the_formula_of_the_ring(self):
    for trace, result in zip(self.traces, self.results, strict=True):
      steps = {s['args']['step']: s for s in _spans(trace, 'step', 'step')}
      sent = collections.Counter()
      for span in _spans(trace, 'collectives'):
        step = span['args']['step']
        # Metrics are reduced after an epoch's last step.
        if span['args']['kind'] == 'all_reduce' and _is_inside(
          span, steps[step]
        ):
          sent[step] += span['args']['sent']
      # 2 (N - 1) / N, with N = 2, of the float32 gradients and of a step's
      # metric sums: the loss and the weight of its rows.
      self.assertEqual(result['metric_values'], 2)
      expected = 4 * (result['parameters'] + result['metric_values'])
      self.assertEqual(sent, dict.fromkeys(range(1, _STEPS + 1), expected))

  def test_progress_bar_shows_means_of_the_epoch(self):
    for trace, result in zip(self.traces, self.results, strict=True):
      steps = _spans(trace, 'step', 'step')
      self.assertLen(result['logs'], _STEPS)
      # The first step traces.
      self.assertNotIn('communication', result['logs'][0])
      # The first epoch without the traced step, and the second epoch.
      half = STEPS_PER_EPOCH
      for first, last in ((1, half - 1), (half, _STEPS - 1)):
        epoch = steps[first : last + 1]
        seconds = sum(step['dur'] for step in epoch) / 1e6
        rows = len(epoch) * GLOBAL_BATCH_SIZE
        shown = result['logs'][last]
        # One bucket comes after the other, and each takes a while.
        least = len(epoch) * LAYERS * BUCKET_SECONDS / seconds
        self.assertBetween(shown['communication'], least - 1e-4, 1.0)
        # The time between steps counts, and ranks meet in each step.
        self.assertBetween(rows / shown['examples/s'], seconds, seconds + 5)
    for first, second in zip(
      *(result['logs'][1:] for result in self.results), strict=True
    ):
      ratio = first['examples/s'] / second['examples/s']
      self.assertBetween(ratio, 0.5, 2.0)

  def test_collectives_are_inside_their_step_and_in_order(self):
    for trace in self.traces:
      steps = {s['args']['step']: s for s in _spans(trace, 'step', 'step')}
      sent = collections.Counter()
      sequences = []
      contents = collections.defaultdict(list)
      for span in _spans(trace, 'collectives'):
        sequences.append(span['args']['sequence'])
        # Skips collectives that are not part of an update, such as metrics.
        if span['args'].get('update') is None:
          continue
        step = span['args']['step']
        self.assertTrue(_is_inside(span, steps[step]), span)
        self.assertGreaterEqual(span['args']['waited_in_queue_us'], 0)
        contents[step] += span['args']['contents'].split(', ')
        sent[step] += 1
      self.assertEqual(sequences, sorted(set(sequences)))
      for names in contents.values():
        variables = [n for n in names if '/' in n]
        self.assertEqual(variables, self.results[0]['variables'][::-1])
      # Each kernel has its own bucket. The biases share one or more buckets.
      self.assertEqual(set(sent), set(steps))
      self.assertLen(set(sent.values()), 1)
      self.assertGreaterEqual(sent[1], LAYERS)


if __name__ == '__main__':
  absltest.main()
