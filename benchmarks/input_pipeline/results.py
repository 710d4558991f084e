"""Rows as a table to read, verdicts in words, and JSON to keep.

Example:

  >>> from benchmarks.input_pipeline import results, rounds
  >>> rows = [rounds.Row('naive', rates=[50.0]), rounds.Row('fast', [200.0])]
  >>> results.ratio(rows, 'fast', 'naive')
  4.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.input_pipeline import rounds, torch_peer

_MEBIBYTE = 1 << 20
# What the defaults are compared with, and by how much they should be faster.
_TARGETS = (
  ('make_dataset', 'naive_arrays', 15.0),
  ('make_dataset_tfrecords', 'naive', 5.0),
)
_PEER_TARGET = 1.5


def ratio(rows: Sequence[rounds.Row], faster: str, slower: str) -> float | None:
  """How many times as many items a second; None if one was not measured.

  Args:
    rows: all of them.
    faster: the name of a row.
    slower: the name of another one.
  """
  rates = {row.name: row.median for row in rows}
  if not rates.get(faster) or not rates.get(slower):
    return None
  return rates[faster] / rates[slower]


def table(rows: Sequence[rounds.Row], train_step_ms: float) -> str:
  """A Markdown table of all rows; one that failed says so.

  Args:
    rows: all of them.
    train_step_ms: 0 leaves the columns about training steps out.
  """
  columns = [
    'variant',
    'items/s',
    'slowest',
    'fastest',
    'first batch ms',
    'CPU s/s',
    'RSS MiB',
    'bound by',
  ]
  if train_step_ms:
    columns[5:5] = ['prep ms', 'step ms', 'step ÷ max(prep, train)']
  return report.markdown(columns, [_cells(row, train_step_ms) for row in rows])


def _cells(row: rounds.Row, train_step_ms: float) -> list[object]:
  def whole(value):
    return None if value is None else f'{value:,.0f}'

  cells = [
    row.name,
    whole(row.median) or 'failed',
    whole(row.slowest),
    whole(row.fastest),
    rounds.middle(row.first_batch_ms),
    rounds.middle(row.cpu_share),
    None if row.peak_rss is None else round(row.peak_rss / _MEBIBYTE),
    'failed' if row.error else _bottleneck(row),
  ]
  if train_step_ms:
    prep, step = rounds.middle(row.prep_ms), rounds.middle(row.step_ms)
    share = None if step is None else step / max(prep, train_step_ms)
    cells[5:5] = [prep, step, share]
  return cells


def _bottleneck(row: rounds.Row) -> str:
  return row.profile['verdict']['bottleneck'] if row.profile else ''


def verdicts(rows: Sequence[rounds.Row]) -> list[str]:
  """A sentence a row: what bounds it, or why it failed."""
  lines = []
  for row in rows:
    if row.error:
      lines.append(f'{row.name}: failed: {row.error}')
    elif row.profile:
      lines.append(f'{row.name}: {row.profile["verdict"]["sentence"]}')
  return lines


def stage_table(row: rounds.Row) -> str:
  """Markdown: what each stage of one variant did, the busiest first.

  'busy' is the share of its threads' time in which a stage works or waits for
  storage; for the rest it waits for its input, for room or for a core.
  """
  profile = row.profile
  steps = max(1, profile['num_steps'])
  cells = [
    [
      stage['name'] + (' (a file)' if stage['in_interleave'] else ''),
      stage['kind'],
      1e3 * stage['work_s'] / steps,
      1e3 * stage['wait_s'] / steps,
      stage['threads'],
      f'{min(1.0, stage["utilisation"]):.0%}',
      stage['num_elements'],
      stage['mean_buffered'],
    ]
    for stage in profile['stages']
  ]
  columns = [
    f'stage of {row.name}',
    'kind',
    'work ms/batch',
    'storage wait ms/batch',
    'threads',
    'busy',
    'elements',
    'buffered',
  ]
  return report.markdown(columns, cells)


def comparisons(rows: Sequence[rounds.Row]) -> list[str]:
  """A sentence for each ratio that has a target and was measured."""
  targets = list(_TARGETS)
  loaders = [row for row in rows if row.name in torch_peer.NAMES and row.median]
  if loaders:
    best = max(loaders, key=lambda row: row.median)
    targets.append(('make_dataset', best.name, _PEER_TARGET))
  lines = []
  for faster, slower, target in targets:
    found = ratio(rows, faster, slower)
    if found is not None:
      lines.append(
        f'{faster} ÷ {slower}: {found:.2f} (target {target:g}: '
        f'{"met" if found >= target else "missed"})'
      )
  return lines


def as_json(
  rows: Sequence[rounds.Row], settings: dict[str, Any]
) -> dict[str, Any]:
  """Everything, for a file.

  Args:
    rows: all of them.
    settings: what was measured.
  """
  return {
    'benchmark': 'input_pipeline',
    **report.environment(),
    'settings': {
      name: report.without_directories(value)
      if isinstance(value, str)
      else value
      for name, value in settings.items()
    },
    'comparisons': comparisons(rows),
    'rows': [
      {**dataclasses.asdict(row), 'items_per_s': row.median} for row in rows
    ],
  }
