"""Compares input pipelines, and draws when the trainer is idle.

  python -m benchmarks.input_pipeline --data_path=mnist.npz
  python -m benchmarks.input_pipeline --dataset=digits --train_step_ms=5 \
    --timeline=steps.svg --variants=naive,prefetch
  python -m benchmarks.input_pipeline --pipeline=my_program.input:dataset

Each variant runs in its own process. Variants take turns in each round. Items are
rows of the first component of a batch. 'first batch' is the time from the creation of
the iterator to the first batch.
"""

import importlib.util
import math
import os
import sys
import tempfile

import numpy as np
from absl import app, flags

from benchmarks import processes, report, worker_pool
from benchmarks.input_pipeline import (
  rounds,
  timeline,
  timeline_svg,
  torch_peer,
  variants,
)
from examples import datasets
from examples.datasets import sources, user_function
from tf_strategies import errors

_DATASET = flags.DEFINE_enum('dataset', 'mnist', sources.DATASETS, 'Data set.')
_DATA_PATH = flags.DEFINE_string(
  'data_path', None, 'MNIST, as an .npz file or a directory.'
)
_NUM_FILES = flags.DEFINE_integer(
  'num_files', 16, 'TFRecord files to write and read.', lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 256, 'Examples per batch.', lower_bound=1
)
_VARIANTS = flags.DEFINE_list(
  'variants', None, 'Variants to run. Default: all.'
)
_ROUNDS = flags.DEFINE_integer(
  'rounds', 5, 'Epochs of each variant.', lower_bound=1
)
_PIPELINE = flags.DEFINE_string(
  variants.OPTION,
  None,
  'module:function that returns a tf.data.Dataset to measure instead.',
)
_STEPS = flags.DEFINE_integer(
  'steps', 200, 'Batches of an infinite --pipeline.', lower_bound=1
)
_TORCH_PYTHON = flags.DEFINE_string(
  'torch_python',
  sys.executable if importlib.util.find_spec('torch') else '',
  "Interpreter with torch. Default: this one, if it has torch. '' runs without "
  'torch.',
)
_TRAIN_STEP_MS = flags.DEFINE_float(
  'train_step_ms',
  0.0,
  'Duration of a simulated training step.',
  lower_bound=0.0,
)
_TIMELINE = flags.DEFINE_string(
  'timeline', None, 'Draw the first steps to this .svg file.'
)
_TIMELINE_STEPS = flags.DEFINE_integer(
  'timeline_steps', 20, 'Number of steps to draw.', lower_bound=1
)
_REPORT_JSON = flags.DEFINE_string(
  'report_json', None, 'JSON file for the results.'
)
_DEADLINE_SECONDS = flags.DEFINE_float(
  'deadline_seconds', 120.0, 'Maximum duration of an epoch.', lower_bound=1.0
)

# A timeline needs a training step.
_MIN_TRAIN_STEP_S = 1e-3


def names() -> list[str]:
  """Returns the variants to measure, in order.

  Raises:
    UnsupportedOptionError: if one is unknown, or cannot be measured here.
  """
  allowed = [*variants.NAMES]
  if _PIPELINE.value:
    allowed = [*variants.USER_PIPELINES]
  elif _TORCH_PYTHON.value:
    allowed += torch_peer.NAMES
  for name in _VARIANTS.value or ():
    if name not in allowed:
      raise errors.UnsupportedOptionError(
        f'variant {name!r}',
        'one of ' + ', '.join(allowed),
        'leave --variants out to measure all of them'
        + (', or pass --torch_python' if name in torch_peer.NAMES else ''),
      )
  return _VARIANTS.value or allowed


def prepare(directory: str) -> dict[str, object]:
  """Writes the data, and returns the arguments for every process.

  Processes of other interpreters can also read the data.

  Raises:
    DataError: if the data cannot be read.
  """
  if _PIPELINE.value:
    return {'pipeline': _PIPELINE.value, 'steps': _STEPS.value}
  data = sources.load(_DATASET.value, _DATA_PATH.value)
  np.save(os.path.join(directory, 'images.npy'), data.train.images)
  np.save(os.path.join(directory, 'labels.npy'), data.train.labels)
  archive = os.path.join(directory, 'data.npz')
  np.savez(
    archive,
    x_train=data.train.images,
    y_train=data.train.labels,
    x_test=data.test.images,
    y_test=data.test.labels,
  )
  shards = os.path.join(directory, 'shards')
  size = math.ceil(len(data.train) / _NUM_FILES.value)
  datasets.extract(archive, shards, examples_per_shard=size)
  return {
    'batch_size': _BATCH_SIZE.value,
    'arrays': directory,
    'directory': shards,
  }


def start(name: str, spec: dict[str, object]) -> worker_pool.WorkerPool:
  """Starts a variant's process, and lets it open the variant."""
  module, python, env = 'actor', sys.executable, processes.python_environment()
  if name in torch_peer.NAMES:
    module, python = 'torch_peer', _TORCH_PYTHON.value
    if python != sys.executable:
      # The other interpreter cannot use this one's packages.
      env = {'PYTHONPATH': ''}
  pool = worker_pool.WorkerPool(
    name,
    f'benchmarks.input_pipeline.{module}:Actor',
    [()],
    python,
    env=env,
    deadline_seconds=_DEADLINE_SECONDS.value,
  )
  pool.send('open', variant=name, spec=spec)
  return pool


def draw_timeline(spec: dict[str, object]) -> None:
  """Draws the first steps of a pipeline, without and with a prefetch.

  Raises:
    WorkerUnavailableError: if the pipeline failed.
  """
  name = 'pipeline' if _PIPELINE.value else 'naive'
  train_step_s = _TRAIN_STEP_MS.value / 1e3
  with start(name, spec) as pool:
    pool.receive()

    def record(prefetch):
      [found] = pool.ask(
        'timeline',
        train_step_s=train_step_s,
        num_steps=_TIMELINE_STEPS.value,
        prefetch=prefetch,
      )
      return timeline.Timeline(**found)

    if not train_step_s:
      found = record(prefetch=False)
      # Equal to the preparation, where a prefetch gains most.
      train_step_s = max(_MIN_TRAIN_STEP_S, found.seconds / len(found.prep))
    drawn = {name: record(False), f'{name} with prefetch': record(True)}
  title = (
    f'{_TIMELINE_STEPS.value} steps of {_PIPELINE.value or _DATASET.value}, '
    f'train step {1e3 * train_step_s:.1f} ms'
  )
  with open(_TIMELINE.value, 'w', encoding='utf-8') as f:
    f.write(timeline_svg.render(drawn, title))
  shares = ', '.join(f'{k} {v.idle_share:.0%}' for k, v in drawn.items())
  print(f'{_TIMELINE.value}: trainer idle: {shares}')


def run() -> int:
  """Measures the chosen variants, and prints and writes the results.

  Returns:
    0, or 1 if a variant failed.

  Raises:
    UnsupportedOptionError: if flags contradict each other, or a file cannot be
      written.
    DataError: if the data cannot be read.
    WorkerUnavailableError: if the pipeline of the timeline failed.
  """
  chosen = names()
  if _TIMELINE.value and not _TIMELINE.value.endswith('.svg'):
    raise errors.UnsupportedOptionError(
      f'timeline={_TIMELINE.value!r}',
      'a file that ends in .svg',
      'write --timeline=steps.svg',
    )
  for flag in (_TIMELINE, _REPORT_JSON):
    report.check_target(flag.name, flag.value)
  if _PIPELINE.value:
    user_function.split(variants.OPTION, _PIPELINE.value)
  settings = (_DATASET, _BATCH_SIZE, _NUM_FILES, _ROUNDS, _TRAIN_STEP_MS)
  content = {
    'benchmark': 'input_pipeline',
    **report.environment(),
    'settings': {flag.name: flag.value for flag in settings},
  }
  with processes.ended_by_signals(), tempfile.TemporaryDirectory() as directory:
    spec = prepare(directory)
    rows = rounds.run(
      chosen,
      lambda name: start(name, spec),
      _ROUNDS.value,
      _TRAIN_STEP_MS.value / 1e3,
    )
    # Prints the rows first, since they took minutes.
    print(
      f'\n{_PIPELINE.value or _DATASET.value}, {_ROUNDS.value} rounds, '
      f'{os.cpu_count()} cores\n\n{rounds.table(rows)}\n'
    )
    for row in rows:
      if row.error:
        print(f'{row.name}: failed: {row.error}')
    if _REPORT_JSON.value:
      records = [row.record() for row in rows]
      report.write_json(_REPORT_JSON.value, content | {'rows': records})
    if _TIMELINE.value:
      draw_timeline(spec)
  return 1 if any(row.error for row in rows) else 0


def main(argv):
  """Runs the benchmark. Returns 1 if anything failed."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
  try:
    return run()
  except errors.Error as e:
    # The message suffices. A traceback would hide it.
    print(e, file=sys.stderr)
    return 1


if __name__ == '__main__':
  app.run(main)
