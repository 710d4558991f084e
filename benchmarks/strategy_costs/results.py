"""What a run of `strategies` found: records and tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.parameter_server_peers import race
from benchmarks.strategy_costs import catalogue, running

# What a record has the median of.
_MEDIANS = (
  'images_per_s',
  'bytes_per_step_into_busiest',
  'bytes_per_step_total',
  'variable_bytes_most',
  'variable_bytes_total',
  'peak_rss_bytes',
)


def measured(job: catalogue.Job, finished: running.Finished) -> dict[str, Any]:
  """Returns what one run of a job found.

  Args:
    job: that ran.
    finished: what it left.

  Raises:
    RuntimeError: it trained other steps than it was to, so that its time would
      mean nothing.
  """
  chief = next(r for r in finished.reports if r['is_chief'])
  if chief['iterations'] != chief['steps']:
    raise RuntimeError(
      f'{job.name} applied {chief["iterations"]} steps, not {chief["steps"]}. '
      'Its time would mean nothing.'
    )
  return {
    'images_per_s': chief['examples_per_second'],
    **_moved(job, chief),
    **_memory(job, finished),
    'steps': chief['steps'],
    'test': chief['test'],
    'curve': chief['curve'],
    'timed_epochs': chief['timed_epochs'],
    'communication': chief['all_reduce'],
    'parameter_server': chief.get('parameter_server'),
    'seconds': finished.seconds,
  }


def _moved(job: catalogue.Job, chief: Mapping[str, Any]) -> dict[str, Any]:
  """Bytes a step: as the strategy counted them, or over loopback."""
  counted = chief['bytes_per_step'] or {}
  busiest = counted.get('into_busiest_device')
  total = counted.get('into_all_devices')
  if job.num_workers:
    epochs = [epoch['loopback_bytes'] for epoch in chief['timed_epochs']]
    total = None if None in epochs else sum(epochs) / chief['steps']
  return {
    'bytes_per_step_into_busiest': busiest,
    'bytes_per_step_total': total,
    'bytes_per_step_counted': chief['bytes_per_step'],
  }


def _memory(job: catalogue.Job, finished: running.Finished) -> dict[str, Any]:
  """Bytes of variables on every device of every task, and the peak."""
  by_device = {}
  for found in finished.reports:
    for device, num_bytes in found['variable_bytes'].items():
      # Workers that train call their devices alike.
      task = f'worker {found["rank"]}: ' if len(finished.reports) > 1 else ''
      by_device[f'{task}{device}'] = num_bytes
  return {
    'variable_bytes': by_device,
    'variable_bytes_most': max(by_device.values()),
    'variable_bytes_total': sum(by_device.values()),
    'peak_rss_bytes': finished.peak_rss_bytes,
  }


@dataclasses.dataclass(frozen=True)
class Rows:
  """What there is to say of a job after all rounds.

  Attributes:
    job: that ran.
    runs: what `measured` found in each round.
    error: why there is nothing more; empty if nothing failed.
  """

  job: catalogue.Job
  runs: Sequence[Mapping[str, Any]]
  error: str = ''

  def median(self, *path: str) -> float | None:
    """The median of a number over rounds; None where one is not known.

    Example:

      >>> rows = Rows(catalogue.COSTS[0], [{'test': {'loss': 1.0}}])
      >>> rows.median('test', 'loss')
      1.0

    Args:
      *path: keys that lead to the number in what was found.
    """
    values = []
    for found in self.runs:
      for key in path:
        found = found[key]
      values.append(found)
    return None if not values or None in values else statistics.median(values)

  def rate(self) -> str:
    """Images a second, and the least and the most of several rounds."""
    if self.error:
      return 'failed'
    rates = [found['images_per_s'] for found in self.runs]
    if None in rates:
      return ''
    text = f'{statistics.median(rates):,.0f}'
    if len(rates) > 1:
      text += f' ({min(rates):,.0f}-{max(rates):,.0f})'
    return text

  def seconds_to_loss(self, target: float) -> float | None:
    """The median time to a test loss; None if a round did not reach it."""
    times = [race.seconds_to(found['curve'], target) for found in self.runs]
    return None if not times or None in times else statistics.median(times)

  def lowest_loss(self) -> float:
    """The lowest test loss; of the round that was worst, if several."""
    return max(min(loss for _, loss in r['curve']) for r in self.runs)

  def record(self, target: float) -> dict[str, Any]:
    """All of it, as the JSON report has it.

    Args:
      target: the test loss whose time is told.
    """
    return {
      'name': self.job.name,
      'strategy': self.job.strategy,
      'num_workers': self.job.num_workers,
      'num_ps': self.job.num_ps,
      'options': dict(self.job.options),
      'error': self.error or None,
      **{name: self.median(name) for name in _MEDIANS},
      'test_loss': self.median('test', 'loss'),
      'test_accuracy': self.median('test', 'accuracy'),
      'seconds_to_loss': self.seconds_to_loss(target),
      'runs': list(self.runs),
    }


def cost_table(rows: Sequence[Rows], num_devices: int) -> str:
  """Returns what each strategy costs as a Markdown table.

  Args:
    rows: one a strategy.
    num_devices: of those that run in one process.
  """
  return report.markdown(
    [
      'strategy',
      'on',
      'images/s',
      'MB a step, busiest',
      'MB a step, all',
      'variables MB, most',
      'variables MB, all',
      'peak RSS MB',
      'test accuracy',
    ],
    [
      [
        row.job.name,
        row.job.describe(num_devices),
        row.rate(),
        _megabytes(row.median('bytes_per_step_into_busiest')),
        _megabytes(row.median('bytes_per_step_total')),
        _megabytes(row.median('variable_bytes_most')),
        _megabytes(row.median('variable_bytes_total')),
        _megabytes(row.median('peak_rss_bytes'), 0),
        _fixed(row.median('test', 'accuracy'), 4),
      ]
      for row in rows
    ],
  )


def scaling_table(rows: Sequence[Rows], target: float, epochs: int) -> str:
  """Returns speed and time to a test loss as a Markdown table.

  Args:
    rows: one a configuration.
    target: the loss.
    epochs: of each run.
  """
  return report.markdown(
    [
      'configuration',
      'on',
      'images/s',
      f's to test loss {target:g}',
      'test loss at the end',
      'test accuracy',
    ],
    [
      [
        row.job.name,
        row.job.describe(1),
        row.rate(),
        _to_loss(row, target, epochs),
        _fixed(row.median('test', 'loss'), 3),
        _fixed(row.median('test', 'accuracy'), 4),
      ]
      for row in rows
    ],
  )


def _to_loss(row: Rows, target: float, epochs: int) -> str:
  if row.error:
    return ''
  seconds = row.seconds_to_loss(target)
  if seconds is not None:
    return f'{seconds:.1f}'
  noun = 'epoch' if epochs == 1 else 'epochs'
  return f'not in {epochs} {noun}: {row.lowest_loss():.2f}'


def _megabytes(num_bytes: float | None, digits: int = 2) -> str:
  return _fixed(None if num_bytes is None else num_bytes / 1e6, digits)


def _fixed(value: float | None, digits: int) -> str:
  return '' if value is None else f'{value:,.{digits}f}'
