"""What a run reports at its end: results, speed, memory, communication."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from examples import mnist_common, mnist_model


class Throughput:
  """Examples a second, without the step that traces the graph.

  Example:

    >>> throughput = Throughput()
    >>> throughput.start_epoch()
    >>> for rows in (32, 32):
    ...   throughput.end_step(rows)
    >>> throughput.end_epoch()
    >>> throughput.examples_per_second > 0
    True
  """

  def __init__(self):
    self._rates = []
    self._start = None
    self._last = None
    self._rows = 0
    self._is_traced = False

  def start_epoch(self) -> None:
    """Starts the clock, unless the first step is still to be traced."""
    self._rows = 0
    self._start = self._last = time.perf_counter() if self._is_traced else None

  def end_step(self, rows: int) -> None:
    """Counts a step of `rows` examples."""
    self._last = time.perf_counter()
    if self._start is None:
      self._start = self._last
      self._is_traced = True
    else:
      self._rows += rows

  def end_epoch(self) -> None:
    """Keeps the epoch's rate, up to its last step."""
    if self._rows:
      self._rates.append(self._rows / (self._last - self._start))

  @property
  def current(self) -> float | None:
    """Examples a second in this epoch so far; None while there are none."""
    return self._rows / (self._last - self._start) if self._rows else None

  @property
  def examples_per_second(self) -> float | None:
    """The median of the epochs; None where no step was measured."""
    return statistics.median(self._rates) if self._rates else None


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What training came to.

  Attributes:
    first_epoch: epochs that were restored rather than trained.
    test: 'loss' and 'accuracy' on the test split.
    train: the same, averaged over the last epoch as it was trained; None if
      every epoch had been done before.
    throughput: examples a second of this run.
    variables: all of the model, the optimizer and the metrics.
    first_step: steps of the epoch after those that were restored too.
    untimed_steps: steps that were trained besides, and taken back.
  """

  first_epoch: int
  test: dict[str, float]
  train: dict[str, float] | None
  throughput: Throughput
  variables: Sequence[keras.Variable]
  first_step: int = 0
  untimed_steps: int = 0


def build(
  example: str,
  setup: mnist_common.Setup,
  model: keras.Model,
  outcome: Outcome,
) -> dict[str, object]:
  """Returns the report of a run, ready for JSON."""
  options, data, replicas = setup.options, setup.data, setup.num_replicas
  epochs = max(options.epochs, outcome.first_epoch)
  steps = (
    epochs - outcome.first_epoch
  ) * data.steps_per_epoch - outcome.first_step
  all_reduce = _all_reduce(setup)
  return {
    'example': example,
    'strategy': options.strategy,
    'is_chief': setup.is_chief,
    'replicas': replicas,
    'devices': list(setup.strategy.extended.worker_devices),
    'dataset': data.source.name,
    'train_examples': data.source.train.num_examples,
    'test_examples': data.source.test.num_examples,
    'model': options.model,
    'parameters': model.count_params(),
    'optimizer': options.optimizer,
    'learning_rate': mnist_model.peak_learning_rate(options, replicas),
    'mixed_precision': options.mixed_precision,
    'global_batch_size': data.global_batch_size,
    'seed': options.seed,
    'epochs': epochs,
    'steps': epochs * data.steps_per_epoch,
    'steps_this_run': steps,
    'train': outcome.train,
    'test': outcome.test,
    'examples_per_second': outcome.throughput.examples_per_second,
    'all_reduce': all_reduce,
    'bytes_per_step': bytes_per_step(all_reduce, steps + outcome.untimed_steps),
    'variable_bytes': variable_bytes(outcome.variables, setup.strategy),
    'versions': {
      'tf_strategies': tfs.__version__,
      'tensorflow': tf.__version__,
      'keras': keras.__version__,
      'numpy': np.__version__,
      'python': platform.python_version(),
    },
  }


def variable_bytes(
  variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy
) -> dict[str, int]:
  """Bytes of variables on each device, every replica's copy and every part.

  Of several workers each knows its own devices only.

  Example:

    >>> v = keras.Variable(np.zeros([3, 5], np.float32))
    >>> list(variable_bytes([v, v], tf.distribute.get_strategy()).values())
    [60]

  Args:
    variables: each counts once, however often it is listed.
    strategy: under which they were made.
  """
  total = {}
  for variable in {id(v): v for v in variables}.values():
    value = variable.value
    parts = getattr(value, 'parts', None)  # Cut, over parameter servers.
    if parts is None:
      parts = strategy.experimental_local_results(value)
    for part in parts:
      size = part.shape.num_elements() * part.dtype.size
      total[part.device] = total.get(part.device, 0) + size
  return total


def bytes_per_step(
  all_reduce: Mapping[str, object], steps: int
) -> dict[str, float] | None:
  """Bytes that the strategy moved in a step, on average.

  What moved before the first step, such as initial values, is counted too: of
  some hundred steps it is nothing.

  Example:

    >>> counted = {'is_counted': True, 'all_reduce_bytes_in': {'a': 6, 'b': 4}}
    >>> bytes_per_step(counted, steps=2)
    {'into_busiest_device': 3.0, 'into_all_devices': 5.0}

  Args:
    all_reduce: what was counted.
    steps: in which it was counted.

  Returns:
    Bytes into the busiest device and into all of them; between workers, bytes
    that this one sent. None where nothing was counted.
  """
  if all_reduce.get('is_one_device'):
    return {'into_busiest_device': 0.0, 'into_all_devices': 0.0}
  if not all_reduce['is_counted'] or not steps:
    return None
  if 'link' in all_reduce:
    sent = all_reduce.get('bytes_sent')
    return None if sent is None else {'sent_by_this_worker': sent / steps}
  received = _received(all_reduce)
  return {
    'into_busiest_device': max(received.values(), default=0) / steps,
    'into_all_devices': sum(received.values()) / steps,
  }


def _received(all_reduce: Mapping[str, object]) -> dict[str, int]:
  """Bytes into each device, of whatever kind was counted."""
  total = {}
  for kind, by_device in all_reduce.items():
    if kind.endswith('_bytes_in'):
      for device, received in by_device.items():
        total[device] = total.get(device, 0) + received
  return total


def summary(report: dict[str, object]) -> str:
  """The report in a few lines."""
  servers = report.get('parameter_server')
  if servers:
    tasks = f'{servers["workers"]} workers, {servers["servers"]} servers'
  else:
    tasks = f'{report["replicas"]} replicas'
  lines = [
    f'{report["strategy"]}: {tasks}, {report["model"]} of '
    f'{report["parameters"]:,} parameters on {report["dataset"]}, '
    f'{report["steps"]:,} steps of {report["global_batch_size"]} examples'
  ]
  for split in ('train', 'test'):
    if report[split]:
      lines.append(
        f'  {split:5} loss {report[split]["loss"]:.4f}, accuracy '
        f'{report[split]["accuracy"]:.4f}'
      )
  if report['examples_per_second']:
    lines.append(f'  speed {report["examples_per_second"]:,.0f} examples/s')
  if servers:
    lines.append(f'  {_describe_servers(servers)}')
  else:
    lines.append(f'  {_describe_all_reduce(report)}')
  return '\n'.join(lines)


def can_log(log_dir: str | None) -> bool:
  """Whether to write TensorBoard logs; warns if that is not installed."""
  if log_dir and importlib.util.find_spec('tensorboard') is None:
    print(
      f'--log_dir={log_dir} is ignored: TensorBoard is not installed, run '
      '`pip install tensorboard`.'
    )
    return False
  return bool(log_dir)


class ScalarLogger:
  """Writes scalars for TensorBoard, where a directory was given.

  Args:
    log_dir: where; None writes nothing.
  """

  def __init__(self, log_dir: str | None):
    self._log_dir = log_dir if can_log(log_dir) else None
    self._writers = {}

  def write(self, step: int, **results: dict[str, float]) -> None:
    """Writes the results of each split under the names that `fit` gives them."""
    if self._log_dir is None:
      return
    for split, scalars in results.items():
      # TensorBoard overlays curves of one name in several directories.
      directory = os.path.join(
        self._log_dir, 'validation' if split == 'test' else split
      )
      if split not in self._writers:
        self._writers[split] = tf.summary.create_file_writer(directory)
      with self._writers[split].as_default(step):
        for name, value in scalars.items():
          tf.summary.scalar(f'epoch_{name}', value)
      self._writers[split].flush()


def write_json(report: dict[str, object], path: str) -> None:
  """Writes the report, all of it or nothing."""
  _make_parent(path)
  with open(f'{path}.new', 'w', encoding='utf-8') as f:
    json.dump(report, f, indent=2)
    f.write('\n')
  os.replace(f'{path}.new', path)


def write_weights(
  variables: dict[str, tf.Variable], path: str, strategy: tf.distribute.Strategy
) -> None:
  """Writes variables to an .npz file, for `examples.compare_weights`.

  Args:
    variables: by name.
    path: of the file. Of several workers the first writes it, or each its own
      where the path has {rank} in it.
    strategy: under which they were trained.
  """
  if '{rank}' in path:
    path = path.replace('{rank}', str(getattr(strategy, 'rank', 0)))
  elif not strategy.extended.should_checkpoint:
    return
  _make_parent(path)
  with open(path, 'wb') as f:
    np.savez(f, **{name: v.numpy() for name, v in variables.items()})


def _make_parent(path: str) -> None:
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)


def _all_reduce(setup) -> dict[str, object]:
  """What the op counted, or why nothing was counted."""
  if hasattr(setup.strategy, 'communication_report'):
    return {'is_counted': True, **setup.strategy.communication_report()}
  if setup.all_reduce is not None:  # Ours, under TensorFlow's strategy.
    return {'is_counted': True, **setup.all_reduce.report()}
  if isinstance(setup.strategy, tfs.ParameterServerStrategy):
    reason = 'gradients go to parameter servers'
  elif setup.num_replicas == 1:
    reason = 'one replica: there is nothing to reduce'
    return {'is_counted': False, 'is_one_device': True, 'reason': reason}
  else:
    reason = (
      f"strategy={setup.options.strategy!r} used TensorFlow's own all-reduce, which "
      'counts nothing'
    )
  return {'is_counted': False, 'reason': reason}


def _describe_servers(servers) -> str:
  staleness = ', '.join(
    f'{count:,} by {steps}' for steps, count in servers['staleness'].items()
  )
  sizes = ' + '.join(f'{n / 1e6:,.2f}' for n in servers['bytes_per_server'])
  return (
    f'{servers["mode"]}: {sizes} MB on the servers; steps by staleness: '
    f'{staleness or "none"}; {servers["dropped"]:,} gradients dropped'
  )


def _describe_all_reduce(report) -> str:
  all_reduce = report['all_reduce']
  if not all_reduce['is_counted']:
    return f'all-reduce not counted: {all_reduce["reason"]}'
  kinds = all_reduce['calls']
  # Where variables have one copy, sums go there and nowhere else.
  calls = kinds.get('all_reduce', 0) or kinds.get('reduce', 0)
  if 'link' in all_reduce:
    sent = all_reduce.get('bytes_sent')
    return (
      f'{all_reduce["link"]}: {calls:,} all-reduces between '
      f'{all_reduce["world_size"]} workers in {report["steps_this_run"]:,} steps'
      + ('' if sent is None else f', {sent / 1e6:,.1f} MB sent by each')
    )
  received = max(_received(all_reduce).values(), default=0)
  return (
    f'{all_reduce["cross_device_ops"]}: {calls:,} calls in '
    f'{report["steps_this_run"]:,} steps, at most {received / 1e6:,.1f} MB '
    'into one device'
  )
