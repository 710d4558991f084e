"""Runs variants in turns, each in its own process, and collects their results."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from benchmarks import measure, report, worker_pool
from tf_strategies import errors


@dataclasses.dataclass
class Row:
  """The results of one variant.

  Attributes:
    name: name of the variant.
    rates: items per second, by round.
    first_batch_ms: milliseconds to the first batch, by round.
    prep_ms: milliseconds per step without a training step, by round.
    step_ms: milliseconds per step with a training step, by round.
    error: error message; empty if it did not fail.
  """

  name: str
  rates: list[float] = dataclasses.field(default_factory=list)
  first_batch_ms: list[float] = dataclasses.field(default_factory=list)
  prep_ms: list[float] = dataclasses.field(default_factory=list)
  step_ms: list[float] = dataclasses.field(default_factory=list)
  error: str = ''

  def record(self) -> dict[str, object]:
    """Returns all results, in the format of the JSON report."""
    return {**dataclasses.asdict(self), 'items_per_s': _median(self.rates)}


def run(
  names: Sequence[str],
  start: Callable[[str], worker_pool.WorkerPool],
  num_rounds: int,
  train_step_s: float,
) -> list[Row]:
  """Measures variants in turns, in another order each round.

  Each has its own process, which first runs an uncounted epoch. A variant that fails
  is not run again.

  Args:
    names: names of the variants.
    start: starts a variant's process and sends it `open`.
    num_rounds: number of counted epochs of each variant.
    train_step_s: duration of the training step, or 0 for none.

  Returns:
    One row per variant, in the order of `names`.
  """
  rows = {name: Row(name) for name in names}
  running: dict[str, worker_pool.WorkerPool] = {}

  def attempt(action, name):
    try:
      action(name)
    except errors.Error as e:
      rows[name].error = str(e)
      if name in running:
        running.pop(name).close()

  def begin(name):
    running[name] = start(name)

  def warm_up(name):
    running[name].receive()
    running[name].ask('run', train_step_s=0.0)

  def count(name):
    _count(running[name], rows[name], train_step_s)

  try:
    # Starts all processes first, because loading TensorFlow takes seconds.
    for action in (begin, warm_up):
      for name in [n for n in names if not rows[n].error]:
        attempt(action, name)
    for order in measure.turns(names, num_rounds):
      for name in [n for n in order if n in running]:
        attempt(count, name)
  finally:
    for pool in running.values():
      pool.close()
  return list(rows.values())


def _count(pool, row: Row, train_step_s: float) -> None:
  [found] = pool.ask('run', train_step_s=0.0)
  if not found['num_steps']:
    raise errors.DataError(
      f'{row.name} yields no batch; expected at least one an epoch'
    )
  row.rates.append(found['num_items'] / found['seconds'])
  row.first_batch_ms.append(1e3 * found['first_batch_s'])
  row.prep_ms.append(_step_ms(found))
  if train_step_s:
    [found] = pool.ask('run', train_step_s=train_step_s)
    row.step_ms.append(_step_ms(found))


def _step_ms(found: dict[str, float]) -> float:
  """Returns the mean step without the first one, which fills a shuffle buffer."""
  steps = found['num_steps']
  if steps == 1:
    return 1e3 * found['seconds']
  return 1e3 * (found['seconds'] - found['first_batch_s']) / (steps - 1)


def table(rows: Sequence[Row]) -> str:
  """Returns a Markdown table of all rows, with their errors."""
  return report.markdown(
    [
      *('variant', 'items/s', 'slowest', 'fastest', 'first batch ms'),
      *('prep ms', 'step ms', 'error'),
    ],
    [
      [
        row.name,
        *(
          f'{value:,.0f}' if row.rates else None
          for value in (
            *(_median(row.rates), min(row.rates, default=0)),
            max(row.rates, default=0),
          )
        ),
        *map(_median, (row.first_batch_ms, row.prep_ms, row.step_ms)),
        'failed' if row.error else None,
      ]
      for row in rows
    ],
  )


def _median(values: Sequence[float]) -> float | None:
  return statistics.median(values) if values else None
