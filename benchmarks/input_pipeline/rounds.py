"""Lets variants take turns, each in its process, and keeps what they answered.

Example:

  >>> from benchmarks.input_pipeline import rounds
  >>> row = rounds.Row('naive', rates=[90.0, 110.0, 100.0])
  >>> row.median, row.fastest, row.slowest
  (100.0, 110.0, 90.0)
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.input_pipeline import children
from tf_strategies import errors


@dataclasses.dataclass
class Row:
  """What was found of one variant.

  Attributes:
    name: of the variant.
    rates: items a second, by round.
    first_batch_ms: milliseconds to the first batch, by round.
    cpu_share: CPU seconds a second, by round.
    prep_ms: milliseconds a step without a training step, by round.
    step_ms: milliseconds a step with it, by round.
    peak_rss: bytes.
    profile: of `stages.Profile`, with its verdict; None for other peers.
    error: why it failed, if it did.
  """

  name: str
  rates: list[float] = dataclasses.field(default_factory=list)
  first_batch_ms: list[float] = dataclasses.field(default_factory=list)
  cpu_share: list[float] = dataclasses.field(default_factory=list)
  prep_ms: list[float] = dataclasses.field(default_factory=list)
  step_ms: list[float] = dataclasses.field(default_factory=list)
  peak_rss: int | None = None
  profile: dict[str, Any] | None = None
  error: str = ''

  @property
  def median(self) -> float | None:
    """Half of the rounds were faster."""
    return middle(self.rates)

  @property
  def fastest(self) -> float | None:
    """The items a second of the best round."""
    return max(self.rates, default=None)

  @property
  def slowest(self) -> float | None:
    """The items a second of the worst round."""
    return min(self.rates, default=None)


def middle(values: Sequence[float]) -> float | None:
  """The median; None of nothing."""
  return statistics.median(values) if values else None


def measure(
  specs: Mapping[str, dict[str, Any]],
  command_of: Callable[[str], list[str]],
  num_rounds: int,
  train_step_s: float,
  deadline_s: float,
  progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
  """Measures variants in turns, in another order each round.

  Each has a process, which first runs an epoch that is not counted, and last
  one that is watched. A variant that fails is left alone from then on.

  Args:
    specs: what each variant's process is told to open, by name.
    command_of: how a variant's process is started.
    num_rounds: counted epochs of each.
    train_step_s: how long the training step is; 0 for none.
    deadline_s: how long an answer may take.
    progress: called with a line now and then.

  Returns:
    A row a variant, in the order of `specs`.
  """
  rows = {name: Row(name) for name in specs}
  running: dict[str, children.Child] = {}

  def attempt(name, action):
    try:
      action()
    except errors.Error as e:
      rows[name].error = str(e)
      progress(f'failed: {e}')
      if name in running:
        running.pop(name).close()

  def start(name):
    running[name] = children.Child(name, command_of(name), deadline_s)
    running[name].send({'do': 'open', 'spec': specs[name]})

  def warm_up(name):
    running[name].receive()
    running[name].ask({'do': 'run', 'train_step_s': 0.0})

  def count(name):
    _run(running[name], rows[name], train_step_s)

  def watch(name):
    request = {
      'do': 'profile',
      'train_step_s': train_step_s,
      'max_seconds': deadline_s / 2,
    }
    rows[name].profile = running[name].ask(request)
    rows[name].peak_rss = running[name].peak_rss

  try:
    # All start before any is waited for: loading TensorFlow takes seconds.
    for name in specs:
      attempt(name, lambda name=name: start(name))
    for name in list(running):
      attempt(name, lambda name=name: warm_up(name))
    for number in range(num_rounds):
      progress(f'round {number + 1} of {num_rounds}')
      for name in random.Random(number).sample(list(running), len(running)):
        attempt(name, lambda name=name: count(name))
    progress('watching the stages')
    for name in list(running):
      attempt(name, lambda name=name: watch(name))
  finally:
    for child in running.values():
      child.close()
  return list(rows.values())


def _run(child: children.Child, row: Row, train_step_s: float) -> None:
  found = child.ask({'do': 'run', 'train_step_s': 0.0})
  if not found['num_steps']:
    raise errors.DataError(
      f'{row.name} yields no batch; expected at least one an epoch'
    )
  row.rates.append(found['num_items'] / found['seconds'])
  row.first_batch_ms.append(1e3 * found['first_batch_s'])
  row.prep_ms.append(_step_ms(found))
  if child.cpu_share is not None:
    row.cpu_share.append(child.cpu_share)
  if train_step_s:
    found = child.ask({'do': 'run', 'train_step_s': train_step_s})
    row.step_ms.append(_step_ms(found))


def _step_ms(found: dict[str, Any]) -> float:
  """Of a steady step: the first one waits for a shuffle buffer to fill."""
  steps = found['num_steps']
  if steps == 1:
    return 1e3 * found['seconds']
  return 1e3 * (found['seconds'] - found['first_batch_s']) / (steps - 1)
