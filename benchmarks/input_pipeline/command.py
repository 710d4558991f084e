"""What `python -m benchmarks.input_pipeline` does with its flags.

Example:

  >>> from benchmarks.input_pipeline import command
  >>> settings = command.Settings(dataset='digits', torch_python='')
  >>> 'make_dataset' in settings.names(), 'pipeline' in settings.names()
  (True, False)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import tempfile
from typing import Any

from absl import flags

from benchmarks import processes, report
from benchmarks.input_pipeline import (
  children,
  results,
  rounds,
  slow_storage,
  timeline,
  timeline_plot,
  torch_peer,
  user_pipeline,
  variants,
  workspace,
)
from examples.datasets import sources, user_function
from tf_strategies import errors

_EXTRACT = ('extract_alone', 'extract_alone_parallel')
# Without a training step there would be nothing to draw.
_LEAST_TRAIN_STEP_S = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the command; see `__main__`."""

  dataset: str = 'mnist'
  data_path: str | None = None
  tfrecord_dir: str | None = None
  num_files: int = 16
  batch_size: int = 256
  variants: list[str] | None = None
  rounds: int = 5
  pipeline: str | None = None
  steps: int = 200
  torch_python: str | None = None
  first_byte_ms: float = 0.0
  storage_mb_per_s: float | None = None
  train_step_ms: float = 0.0
  timeline: str | None = None
  timeline_steps: int = 20
  stages: bool = False
  report_json: str | None = None
  deadline: float = 120.0

  @classmethod
  def of_flags(cls, values: flags.FlagValues) -> Settings:
    """The flags' values."""
    return cls(
      **{field.name: values[field.name].value for field in _fields(cls)}
    )

  @property
  def storage(self) -> slow_storage.Storage:
    """The simulated storage."""
    return slow_storage.Storage(self.first_byte_ms, self.storage_mb_per_s)

  @property
  def python_of_torch(self) -> str:
    """The interpreter that runs torch; empty if there is none."""
    if self.torch_python is not None:
      return self.torch_python
    return sys.executable if importlib.util.find_spec('torch') else ''

  def names(self) -> list[str]:
    """The variants to measure, in order.

    Raises:
      UnsupportedOptionError: one is unknown, or cannot be measured here.
    """
    if self.pipeline:
      allowed = list(variants.OF_A_USER)
    else:
      allowed = [*variants.OF_FILES, *variants.OF_ARRAYS]
      if self.storage.is_slow:
        fast = f'cache{variants.FAST_STORAGE}'
        allowed.insert(allowed.index('cache') + 1, fast)
      if self.python_of_torch:
        allowed += torch_peer.NAMES
    if self.variants is None:
      # Where storage is fast they say nothing.
      skipped = () if self.storage.is_slow else _EXTRACT
      return [name for name in allowed if name not in skipped]
    for name in self.variants:
      if name.removesuffix(variants.FAST_STORAGE) not in allowed:
        raise errors.UnsupportedOptionError(
          f'variant {name!r}',
          'one of ' + ', '.join(allowed),
          'leave --variants out to measure all of them'
          + (', or pass --torch_python' if name in torch_peer.NAMES else ''),
        )
    return list(self.variants)


def _fields(cls):
  return dataclasses.fields(cls)


def run(settings: Settings) -> int:
  """Measures, prints and writes what was asked for.

  Args:
    settings: of the command.

  Returns:
    0, or 1 if a variant failed.

  Raises:
    UnsupportedOptionError: settings that contradict each other, or a file that
      could not be written.
    DataError: data that cannot be read.
  """
  names = settings.names()
  if settings.timeline:
    timeline_plot.check(settings.timeline)
  for option in ('timeline', 'report_json'):
    report.check_target(option, getattr(settings, option))
  if settings.pipeline:
    user_function.split(user_pipeline.OPTION, settings.pipeline)
  with processes.ended_by_signals(), tempfile.TemporaryDirectory() as directory:
    common = _prepare(settings, directory)
    rows = rounds.measure(
      {name: {**common, 'variant': name} for name in names},
      lambda name: _command(name, settings),
      settings.rounds,
      settings.train_step_ms / 1e3,
      settings.deadline,
      progress=_progress,
    )
    # First of all what took minutes to measure.
    _show(settings, rows)
    if settings.report_json:
      content = results.as_json(rows, dataclasses.asdict(settings))
      report.write_json(settings.report_json, content)
    failure = _draw_timeline(settings, common)
  if failure:
    print(f'timeline: failed: {failure}', flush=True)
  return 1 if failure or any(row.error for row in rows) else 0


def _progress(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _command(name: str, settings: Settings) -> list[str]:
  if name in torch_peer.NAMES:
    return children.torch_command(settings.python_of_torch)
  return children.tensorflow_command()


def _prepare(settings: Settings, directory: str) -> dict[str, Any]:
  """What every process is told."""
  common = {
    'batch_size': settings.batch_size,
    'first_byte_ms': settings.first_byte_ms,
    'mb_per_s': settings.storage_mb_per_s,
    'pipeline': settings.pipeline,
    'steps': settings.steps,
  }
  if settings.pipeline:
    return common
  data = sources.load(settings.dataset, settings.data_path)
  arrays, shards = workspace.prepare(
    data, directory, settings.num_files, settings.tfrecord_dir
  )
  return {**common, 'arrays': arrays, 'directory': os.path.abspath(shards)}


def _show(settings: Settings, rows: list[rounds.Row]) -> None:
  source = settings.pipeline or settings.dataset
  caption = (
    f'{source}, batches of {settings.batch_size}, {settings.rounds} rounds, '
    f'{os.cpu_count()} cores'
  )
  if settings.pipeline:
    caption = f'{source}, {settings.rounds} rounds, {os.cpu_count()} cores'
  if settings.storage.is_slow:
    caption += f', {settings.first_byte_ms:g} ms to the first byte of a file'
  if settings.storage_mb_per_s:
    caption += f', {settings.storage_mb_per_s:g} MB/s a reader'
  if settings.train_step_ms:
    caption += f', train step {settings.train_step_ms:g} ms'
  print(f'\n{caption}\n\n{results.table(rows, settings.train_step_ms)}\n')
  for line in [*results.verdicts(rows), '', *results.comparisons(rows)]:
    print(line)
  if settings.stages:
    for row in rows:
      if row.profile:
        print(f'\n{results.stage_table(row)}')
  sys.stdout.flush()


def _draw_timeline(settings: Settings, common: dict[str, Any]) -> str:
  """Draws, or returns why it could not."""
  if not settings.timeline:
    return ''
  name = 'pipeline' if settings.pipeline else 'naive'
  train_step_s = settings.train_step_ms / 1e3
  drawn = {}
  try:
    with children.Child(
      name, children.tensorflow_command(), settings.deadline
    ) as child:
      child.ask({'do': 'open', 'spec': {**common, 'variant': name}})

      def record(prefetch):
        request = {
          'do': 'timeline',
          'train_step_s': train_step_s,
          'num_steps': settings.timeline_steps,
          'prefetch': prefetch,
        }
        return timeline.Timeline(**child.ask(request))

      if not train_step_s:
        found = record(prefetch=False)
        # As long as the preparation: where overlapping gains most.
        train_step_s = max(_LEAST_TRAIN_STEP_S, found.seconds / len(found.prep))
      drawn[name] = record(prefetch=False)
      drawn[f'{name} with prefetch'] = record(prefetch=True)
  except errors.Error as e:
    return str(e)
  title = (
    f'{settings.timeline_steps} steps of {settings.pipeline or settings.dataset}'
    f', train step {1e3 * train_step_s:.1f} ms'
  )
  timeline_plot.write(settings.timeline, drawn, title)
  shares = ', '.join(f'{k} {v.idle_share:.0%}' for k, v in drawn.items())
  _progress(f'{settings.timeline}: trainer idle: {shares}')
  return ''
