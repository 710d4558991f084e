"""Records and the table of the results of `strategies`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.strategy_costs import catalogue

# Fields with medians in a record.
_MEDIANS = (
  'images_per_s',
  'bytes_per_step_into_busiest',
  'bytes_per_step_total',
  'variable_bytes_most',
  'variable_bytes_total',
  'test_accuracy',
)


def measured(
  job: catalogue.Job, reports: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """Returns the results of one run of a job.

  Args:
    job: the job.
    reports: reports of its tasks that trained.

  Raises:
    RuntimeError: if the number of trained steps is wrong, which invalidates the time.
  """
  chief = next(r for r in reports if r['is_chief'])
  if chief['iterations'] != chief['steps']:
    raise RuntimeError(
      f'{job.name} applied {chief["iterations"]} steps, not {chief["steps"]}. '
      'Its time would mean nothing.'
    )
  return {
    'images_per_s': chief['examples_per_second'],
    **_moved(job, chief),
    **_memory(reports),
    'test_accuracy': chief['test']['accuracy'],
    'timed_epochs': chief['timed_epochs'],
  }


def _moved(job: catalogue.Job, chief: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the bytes per step, as counted by the strategy or on loopback."""
  busiest, total = chief['bytes_per_step']
  if job.num_workers:
    epochs = [epoch['loopback_bytes'] for epoch in chief['timed_epochs']]
    total = None if None in epochs else sum(epochs) / chief['steps']
  return {'bytes_per_step_into_busiest': busiest, 'bytes_per_step_total': total}


def _memory(reports: Sequence[dict[str, Any]]) -> dict[str, int]:
  """Returns the bytes of variables on the devices of all tasks."""
  sizes = [size for r in reports for size in r['variable_bytes'].values()]
  return {'variable_bytes_most': max(sizes), 'variable_bytes_total': sum(sizes)}


def record(
  job: catalogue.Job, runs: Sequence[Mapping[str, Any]], error: str = ''
) -> dict[str, Any]:
  """Returns the results of a job, in the format of the JSON report.

  Args:
    job: the job.
    runs: results of `measured`, by round.
    error: error message, or '' if no run failed.
  """
  return {
    'name': job.name,
    'strategy': job.strategy,
    'num_workers': job.num_workers,
    'num_ps': job.num_ps,
    'options': dict(job.options),
    'error': error or None,
    **{name: _median([run[name] for run in runs]) for name in _MEDIANS},
    'runs': list(runs),
  }


def table(records: Sequence[Mapping[str, Any]], num_devices: int) -> str:
  """Returns the results of all strategies as a Markdown table.

  Args:
    records: results of `record`, one per strategy.
    num_devices: number of devices of strategies in one process.
  """
  names = (
    *('bytes_per_step_into_busiest', 'bytes_per_step_total'),
    *('variable_bytes_most', 'variable_bytes_total'),
  )
  rows = []
  for found in records:
    keys = ('name', 'strategy', 'num_workers', 'num_ps')
    job = catalogue.Job(*(found[key] for key in keys))
    megabytes = [
      '' if found[name] is None else f'{found[name] / 1e6:.2f}'
      for name in names
    ]
    accuracy = '' if found['error'] else f'{found["test_accuracy"]:.4f}'
    rows.append(
      [
        *(f'`{job.name}`', job.describe(num_devices), _rate(found)),
        *(*megabytes, accuracy),
      ]
    )
  return report.markdown(
    [
      *('Strategy', 'On', 'Images/s', 'MB a step, busiest device'),
      *('all devices', 'Variables MB, most on a device', 'on all'),
      'Test accuracy',
    ],
    rows,
  )


def _rate(found: Mapping[str, Any]) -> str:
  """Returns the median of the rounds, with minimum and maximum of several rounds."""
  if found['error']:
    return 'failed'
  rates = [run['images_per_s'] for run in found['runs']]
  text = f'{found["images_per_s"]:,.0f}'
  if len(rates) > 1:
    text += f' ({min(rates):,.0f} to {max(rates):,.0f})'
  return text


def _median(values: Sequence[float | None]) -> float | None:
  return None if not values or None in values else statistics.median(values)
