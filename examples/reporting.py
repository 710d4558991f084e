"""What a run reports: speed, results, memory, communication."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import tf_strategies as tfs
from examples import common
from tf_strategies.checkpoint import model_state

FLAGS = flags.FLAGS


class Run:
  """Measures a run, and reports it; make it before data are distributed.

  It starts at `start`. A custom loop runs in its context.
  """

  def __init__(self, example: str, strategy, data, start=(0, 0)):
    self._example = example
    self._strategy = strategy
    self._data = data
    self._start = tuple(start)
    self._steps = common.steps_per_epoch(data)
    self.monitor = (
      tfs.monitoring.TrainingMonitor(FLAGS.timeline) if FLAGS.timeline else None
    )
    self._rates: list[float] = []
    self._epoch = 0
    # When the clock started, and the images before; None before the first
    # step, which traces the graph and is not counted.
    self._began: tuple[float, int] | None = None
    self.images_per_second: float | None = None  # In this epoch so far.
    self._writers: dict[str, Any] = {}
    self.is_shown = FLAGS.verbose and common.is_chief(strategy)
    if self.is_shown:
      print(f'Training on {_describe(strategy, data)}.', flush=True)

  def __enter__(self) -> Run:
    if self.monitor:
      epoch, step = self._start
      self.monitor.start(self._strategy, epoch * self._steps + step)
    return self

  def __exit__(self, *unused) -> None:
    if self.monitor:
      self.monitor.close()

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Context of a step of a custom loop, counted from 0 in its epoch."""
    with self.monitor.step() if self.monitor else contextlib.nullcontext():
      yield
    self.end_step(step + 1)

  def begin_epoch(self, epoch: int) -> None:
    """Starts the clock, unless the first step is still to be traced."""
    self._epoch = epoch
    self.images_per_second = None
    if self._began is not None:
      self._began = time.perf_counter(), self._images(0)

  def end_step(self, step: int) -> None:
    """Notes that so many steps of the epoch are done."""
    if step >= self._steps:
      common.join(self._strategy)
    now, images = time.perf_counter(), self._images(step)
    if self._began is None:
      self._began = now, images
    else:
      began, before = self._began
      self.images_per_second = (images - before) / (now - began)

  def end_epoch(self) -> None:
    """Keeps the speed of the epoch, up to its last step."""
    if self.images_per_second is not None:
      self._rates.append(self.images_per_second)

  @property
  def median_images_per_second(self) -> float | None:
    """Median over all epochs, or None if no step was measured."""
    return statistics.median(self._rates) if self._rates else None

  def _images(self, step: int) -> int:
    return common.images_in_steps(self._data, self._epoch * self._steps + step)

  def log_epoch(
    self, epoch: int, train: Mapping[str, float], test: Mapping[str, float]
  ) -> None:
    """Shows the results of an epoch of a custom loop, and logs their curves."""
    if self.is_shown:
      results = '; '.join(
        f'{split} loss {found["loss"]:.4f}, accuracy {found["accuracy"]:.4f}'
        for split, found in (('train', train), ('test', test))
      )
      speed = self.images_per_second or 0.0
      print(
        f'Epoch {epoch + 1}/{FLAGS.epochs}: {results}; {speed:,.0f} images/s',
        flush=True,
      )
    if not common.can_log(self._strategy):
      return
    for split, found in (('train', train), ('validation', test)):
      if split not in self._writers:
        directory = os.path.join(FLAGS.log_dir, split)
        self._writers[split] = tf.summary.create_file_writer(directory)
      with self._writers[split].as_default(epoch):
        for name, value in found.items():
          tf.summary.scalar(f'epoch_{name}', value)
      self._writers[split].flush()

  def callbacks(self) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of `fit` that measure and log."""
    callbacks = [_RunCallback(self)]
    if common.can_log(self._strategy):
      callbacks.append(keras.callbacks.TensorBoard(FLAGS.log_dir))
    if self.monitor:
      callbacks.append(tfs.MonitorCallback(FLAGS.timeline))
    return callbacks

  def report(self, model, optimizer, metrics, train, test) -> dict[str, Any]:
    """Shows and returns the report; writes --report_json and --save_weights.

    `train` has the loss and accuracy of the last epoch as it was trained, or is
    None if every epoch had been done before; `test` those on the test split.
    """
    strategy, data = self._strategy, self._data
    first, step = self._start
    epochs = max(FLAGS.epochs, first)
    steps = (epochs - first) * self._steps - step
    _save_weights(strategy, model, optimizer)
    all_reduce = _all_reduce(strategy)
    variables = [*model.variables, *optimizer.variables]
    variables += [v for metric in metrics for v in metric.variables]
    names = ('strategy', 'model', 'optimizer', 'mixed_precision', 'seed')
    report = {
      'example': self._example,
      **{name: FLAGS[name].value for name in names},
      'global_batch_size': FLAGS.global_batch_size,
      'learning_rate': common.learning_rate(strategy),
      'is_chief': common.is_chief(strategy),
      'description': _describe(strategy, data),
      'replicas': strategy.num_replicas_in_sync,
      'devices': list(strategy.extended.worker_devices),
      'dataset': data.name,
      'train_examples': data.train.num_examples,
      'test_examples': data.test.num_examples,
      'parameters': model.count_params(),
      'epochs': epochs,
      'steps': epochs * self._steps,
      'steps_this_run': steps,
      'iterations': int(optimizer.iterations.numpy()),
      'train': train,
      'test': test,
      'examples_per_second': self.median_images_per_second,
      'all_reduce': all_reduce,
      'bytes_per_step': bytes_per_step(all_reduce, steps),
      'variable_bytes': variable_bytes(strategy, variables),
      'parameter_server': _servers(strategy),
      'versions': {
        'tf_strategies': tfs.__version__,
        'tensorflow': tf.__version__,
        'keras': keras.__version__,
        'numpy': np.__version__,
        'python': platform.python_version(),
      },
    }
    if report['is_chief']:
      print(summary(report), flush=True)
      if FLAGS.report_json:
        write_json(report, FLAGS.report_json)
    return report


def last_results(history: keras.callbacks.History | None):
  """Returns loss and accuracy in the last epoch, if any, and on the test set."""
  if history is None or not history.history:
    return None, None
  last = {name: values[-1] for name, values in history.history.items()}
  return tuple(
    {name: float(last[f'{prefix}{name}']) for name in ('loss', 'accuracy')}
    for prefix in ('', 'val_')
  )


class _RunCallback(keras.callbacks.Callback):
  """Tells a run when steps and epochs end."""

  def __init__(self, run: Run):
    super().__init__()
    self._run = run
    self._done = 0

  def on_epoch_begin(self, epoch, logs=None):
    self._run.begin_epoch(epoch)

  def on_train_batch_begin(self, batch, logs=None):
    self._done = batch

  def on_train_batch_end(self, batch, logs=None):
    self._run.end_step(self._done + self.model.steps_per_execution)

  def on_epoch_end(self, epoch, logs=None):
    self._run.end_epoch()


def summary(report: Mapping[str, Any]) -> str:
  """Returns the report in a few lines."""
  lines = [
    f'Trained {report["model"]} of {report["parameters"]:,} parameters for '
    f'{report["steps"]:,} steps on {report["description"]}.'
  ]
  for split in ('train', 'test'):
    if report[split]:
      lines.append(
        f'  {split:5} loss {report[split]["loss"]:.4f}, accuracy '
        f'{report[split]["accuracy"]:.4f}'
      )
  if report['examples_per_second']:
    lines.append(f'  speed {report["examples_per_second"]:,.0f} images/s')
  return '\n'.join([*lines, f'  {_describe_traffic(report)}'])


def _describe(strategy, data) -> str:
  replicas = strategy.num_replicas_in_sync
  tasks = f'{replicas} replica' + ('s' if replicas > 1 else '')
  if servers := _servers(strategy):
    tasks = ', '.join(
      f'{n} {kind}' + ('s' if n != 1 else '')
      for kind, n in (
        ('worker', servers['workers']),
        ('server', servers['servers']),
      )
    )
  return (
    f'{data.name} ({data.train.num_examples:,} images, '
    f'{data.test.num_examples:,} to test) in batches of '
    f'{FLAGS.global_batch_size} with {FLAGS.strategy}: {tasks}'
  )


def _describe_traffic(report) -> str:
  counted, servers = report['all_reduce'], report['parameter_server']
  steps = f'{report["steps_this_run"]:,} steps'
  if servers:
    sizes = ' + '.join(f'{n / 1e6:,.2f}' for n in servers['bytes_per_server'])
    # A gradient is stale by the updates of others since its weights were read.
    staleness = ', '.join(
      f'{s:,} ({n:,} steps)' for s, n in servers['staleness'].items() if n
    )
    return (
      f'{servers["mode"]}: {sizes} MB on the servers; updates that gradients had '
      f'missed: {staleness or "none"}; {servers["dropped"]:,} gradients dropped'
    )
  if not counted['is_counted']:
    return f'all-reduce not counted: {counted["reason"]}'
  # Where variables have one copy, sums go there and nowhere else.
  kinds = counted['calls']
  calls = kinds.get('all_reduce', 0) or kinds.get('reduce', 0)
  if 'link' in counted:
    return (
      f'{counted["link"]}: {calls:,} all-reduces between '
      f'{counted["world_size"]} workers in {steps}'
    )
  most = max(_bytes_in(counted).values(), default=0)
  return (
    f'{counted["cross_device_ops"]}: {calls:,} calls in {steps}, at most '
    f'{most / 1e6:,.1f} MB into one device'
  )


def _servers(strategy) -> dict[str, Any] | None:
  """Returns the counts of a strategy with parameter servers; None for all others."""
  if not common.has_servers(strategy):
    return None
  jobs = strategy.cluster.jobs
  tasks = {'workers': len(jobs['worker']), 'servers': len(jobs['ps'])}
  return {**tasks, **strategy.report()}


def _all_reduce(strategy) -> dict[str, Any]:
  """Returns the strategy's counters, or the reason why there are none."""
  if hasattr(strategy, 'communication_report'):
    return {'is_counted': True, **strategy.communication_report()}
  if common.has_servers(strategy):
    return {'is_counted': False, 'reason': 'gradients go to parameter servers'}
  if strategy.num_replicas_in_sync == 1:
    reason = 'one replica: there is nothing to reduce'
    return {'is_counted': False, 'is_one_device': True, 'reason': reason}
  reason = f"{FLAGS.strategy} used TensorFlow's own all-reduce"
  return {'is_counted': False, 'reason': reason}


def _bytes_in(counted: Mapping[str, Any]) -> dict[str, int]:
  """Bytes received by each device, of all kinds of calls."""
  total = {}
  for kind, by_device in counted.items():
    if kind.endswith('_bytes_in'):
      for device, received in by_device.items():
        total[device] = total.get(device, 0) + received
  return total


def bytes_per_step(
  counted: Mapping[str, Any], steps: int
) -> dict[str, float] | None:
  """Returns the bytes that moved in a step, on average; None if not counted.

  Example:

    >>> counted = {'is_counted': True, 'all_reduce_bytes_in': {'a': 6, 'b': 4}}
    >>> bytes_per_step(counted, steps=2)
    {'into_busiest_device': 3.0, 'into_all_devices': 5.0}
  """
  if counted.get('is_one_device'):
    return {'into_busiest_device': 0.0, 'into_all_devices': 0.0}
  if not counted['is_counted'] or not steps:
    return None
  if 'link' in counted:
    sent = counted.get('bytes_sent')
    return None if sent is None else {'sent_by_this_worker': sent / steps}
  received = _bytes_in(counted).values()
  return {
    'into_busiest_device': max(received, default=0) / steps,
    'into_all_devices': sum(received) / steps,
  }


def variable_bytes(strategy, variables: Iterable[Any]) -> dict[str, int]:
  """Returns the bytes of all copies and parts of variables, by device."""
  total = {}
  for variable in {id(v): v for v in variables}.values():
    parts = getattr(variable.value, 'parts', None)
    for part in parts or strategy.experimental_local_results(variable.value):
      size = part.shape.num_elements() * part.dtype.size
      total[part.device] = total.get(part.device, 0) + size
  return total


def write_json(report: Mapping[str, Any], path: str) -> None:
  """Writes the report, all of it or nothing."""
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with open(f'{path}.new', 'w', encoding='utf-8') as f:
    json.dump(report, f, indent=2)
    f.write('\n')
  os.replace(f'{path}.new', path)


def _save_weights(strategy, model, optimizer) -> None:
  """Writes the final state to --save_weights, by name."""
  path = FLAGS.save_weights
  if path and '{rank}' in path:
    path = path.replace('{rank}', str(getattr(strategy, 'rank', 0)))
  elif not path or not common.is_chief(strategy):
    return
  named = model_state.name_variables(model, optimizer)
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with open(path, 'wb') as f:
    np.savez(f, **{name: v.value.numpy() for name, v in named.items()})
