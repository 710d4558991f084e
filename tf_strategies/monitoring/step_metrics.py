"""Metrics of a run: step time, rates, and shares of the step time.

`communication_share` is the time in which collectives were in progress, most of
it hidden behind the backward pass; `exposed_communication_share` is the time in
which the step waited for them. Input, exposed communication and compute add up
to 1.
"""

import collections
import os
import time
from collections.abc import Mapping
from typing import Any

from tf_strategies.monitoring import step_breakdown


class Totals:
  """Sums over the steps since the last line.

  Args:
    world_size: number of workers.
    global_batch_size: for input that was not visible; None if unknown.
    group: counts the bytes sent; None where collectives are not recorded.
  """

  def __init__(
    self, world_size: int, global_batch_size: int | None, group: Any = None
  ):
    self._world_size = world_size
    self._global_batch_size = global_batch_size
    self._group = group
    self._reset(self._bytes_sent())

  def _reset(self, bytes_sent: int | None) -> None:
    self.steps = 0
    self._sent_before = bytes_sent
    self._ns = collections.Counter()
    self._sent_by_kind = collections.Counter()
    self._rows: int | None = 0
    self._all_rows: int | None = 0

  def _bytes_sent(self) -> int | None:
    return None if self._group is None else self._group.bytes_sent

  def add(self, step: step_breakdown.Breakdown, num_steps: int) -> None:
    """Adds `num_steps` steps that were measured together."""
    self.steps += num_steps
    self._ns.update(step.nanoseconds())
    self._sent_by_kind.update(step.sent_by_kind)
    self._rows = _plus(self._rows, step.rows)
    self._all_rows = _plus(self._all_rows, step.all_rows)

  def _examples(self) -> tuple[float | None, int | None]:
    """Those of this worker, and of all."""
    all_rows, rows = self._all_rows, self._rows
    if all_rows is None and self._global_batch_size is not None:
      all_rows = self._global_batch_size * self.steps
    if rows is None and all_rows is not None:
      rows = all_rows / self._world_size
    return rows, all_rows

  def rates(self, seconds: float | None = None) -> dict[str, float | None]:
    """Examples a second and shares of the time, None where not measured.

    The examples are those of the time in steps, or of so many `seconds`.
    """
    if seconds is None:
      seconds = self._ns['step'] / 1e9
    rows, all_rows = self._examples()
    shares = {
      f'{name}_share': ns / self._ns['step']
      for name, ns in self._ns.items()
      if name != 'step'
    }
    # Unknown: it is part of compute.
    if self._rows is None:
      shares['input_share'] = None
    if self._group is None:
      shares['communication_share'] = None
      shares['exposed_communication_share'] = None
    return {
      'examples_per_second': None if rows is None else rows / seconds,
      'global_examples_per_second': (
        None if all_rows is None else all_rows / seconds
      ),
      **shares,
    }

  def record(self, step: int) -> dict[str, Any]:
    """The values of a line, None where not measured; all sums begin anew."""
    rows, all_rows = self._examples()
    sent = self._bytes_sent()
    line = {
      'time': time.time(),
      'step': step,
      'steps': self.steps,
      'step_seconds': self._ns['step'] / 1e9 / self.steps,
      'examples': rows,
      'global_examples': all_rows,
      **self.rates(),
      'sent_by_kind': dict(self._sent_by_kind),
      # Since the last line, so that bytes between two steps count as well.
      'bytes_sent': None if sent is None else sent - self._sent_before,
      'bytes_sent_total': sent,
      'rss_bytes': resident_bytes(),
    }
    self._reset(sent)
    return line


def _plus(total: int | None, more: int | None) -> int | None:
  """The sum; unknown if one part is."""
  return None if total is None or more is None else total + more


def resident_bytes() -> int | None:
  """The resident memory of this process; None where there is no /proc."""
  try:
    with open('/proc/self/statm', encoding='ascii') as f:
      return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  except OSError:
    return None


def progress_line(record: Mapping[str, Any]) -> str:
  """Formats a record for people.

  Example:

    >>> print(progress_line({'step': 8, 'step_seconds': 0.0125,
    ...   'examples_per_second': 2560.0, 'global_examples_per_second': 5120.0,
    ...   'communication_share': 0.4, 'exposed_communication_share': 0.1,
    ...   'input_share': None, 'bytes_sent': 3_000_000, 'steps': 2,
    ...   'rss_bytes': 512_000_000}))
    step 8: 12.5 ms, 5,120 examples/s (2,560 here), communication 40% (10% exposed), 1.50 MB sent a step, 512 MB RSS
  """
  parts = [f'{1e3 * record["step_seconds"]:.1f} ms']
  if record['global_examples_per_second'] is not None:
    parts.append(
      f'{record["global_examples_per_second"]:,.0f} examples/s '
      f'({record["examples_per_second"]:,.0f} here)'
    )
  if record['communication_share'] is not None:
    parts.append(
      f'communication {record["communication_share"]:.0%} '
      f'({record["exposed_communication_share"]:.0%} exposed)'
    )
  if record['input_share'] is not None:
    parts.append(f'input {record["input_share"]:.0%}')
  if record['bytes_sent'] is not None:
    sent = record['bytes_sent'] / record['steps']
    parts.append(f'{sent / 1e6:,.2f} MB sent a step')
  if record['rss_bytes'] is not None:
    parts.append(f'{record["rss_bytes"] / 1e6:,.0f} MB RSS')
  return f'step {record["step"]}: ' + ', '.join(parts)
