"""Records and tables of the results of `parameter_server`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.parameter_server_peers import catalogue


@dataclasses.dataclass(frozen=True)
class Range:
  """Median and extremes of some samples.

  Attributes:
    median: median.
    least: minimum.
    most: maximum.
  """

  median: float
  least: float
  most: float

  @classmethod
  def of(cls, samples: Sequence[float]) -> Range:
    """Returns the range of one or more samples.

    Example:

      >>> str(Range.of([12.0, 10.0, 17.0]))
      '12.0 (10.0-17.0)'
    """
    return cls(statistics.median(samples), min(samples), max(samples))

  def __str__(self) -> str:
    return f'{self.median:.1f} ({self.least:.1f}-{self.most:.1f})'


def check_turn(
  peer: str, turn: Mapping[str, Any], steps: int, initial_loss: float
) -> None:
  """Compares the steps of a peer with the requested steps.

  For the reference, the count may only be too low. Keras counts by reading, adding and
  writing back, so two workers that do this at the same time count one step. `join` has
  waited for all of them.

  Args:
    peer: name of the peer.
    turn: result of its coordinator.
    steps: number of requested steps.
    initial_loss: loss before these steps.

  Raises:
    RuntimeError: if it trained other steps, or nothing. Its time would mean nothing.
  """
  counted = turn['iterations']
  is_right = counted == steps
  if peer == catalogue.REFERENCE:
    is_right = 0 < counted <= steps
  if not is_right:
    raise RuntimeError(
      f'{peer} applied {counted} steps, not {steps}. Its time would mean '
      'nothing.'
    )
  # Also True for NaN.
  if not abs(turn['loss'] - initial_loss) > 0:
    raise RuntimeError(
      f'{peer} has a loss of {turn["loss"]} after {steps} steps, and '
      f'{initial_loss} before. Its time would mean nothing.'
    )


def check_initial_losses(losses: Mapping[str, float]) -> None:
  """Compares the models of all peers before the training.

  Args:
    losses: initial losses by peer.

  Raises:
    RuntimeError: if they differ.
  """
  first, expected = next(iter(losses.items()))
  for peer, loss in losses.items():
    if not abs(loss - expected) <= 1e-4 * abs(expected):
      raise RuntimeError(
        f'{peer} begins with a loss of {loss}, {first} with {expected}. They '
        'would not train the same model.'
      )


def record(
  peer: str,
  turns: Sequence[Mapping[str, Any]],
  steps: int,
  rows: int,
) -> dict[str, Any]:
  """Returns the results of a peer, in the format of the JSON report.

  Args:
    peer: name of the peer.
    turns: results of its coordinator, by round.
    steps: number of steps per block.
    rows: number of rows per step.
  """
  samples = [sample for turn in turns for sample in turn['samples']]
  rates = Range.of([steps / seconds for seconds in samples])
  return {
    'peer': peer,
    'steps_per_s': dataclasses.asdict(rates),
    'examples_per_s': rows * rates.median,
    'iterations': turns[-1]['iterations'],
    # Includes the warm-up block.
    'steps_per_turn': steps * (1 + len(turns[-1]['samples'])),
    'loss': turns[-1]['loss'],
    'samples': samples,
  }


def add_ratios(records: Sequence[dict[str, Any]]) -> None:
  """Adds to each record the ratio of its median to the reference's.

  Example:

    >>> records = [{'peer': 'stock', 'steps_per_s': {'median': 100.0}},
    ...            {'peer': 'ours', 'steps_per_s': {'median': 150.0}}]
    >>> add_ratios(records)
    >>> records[1]['ratio_to_stock']
    1.5

  Args:
    records: records of one case. Ratios are None if the reference did not run.
  """
  medians = {r['peer']: r['steps_per_s']['median'] for r in records}
  reference = medians.get(catalogue.REFERENCE)
  for found in records:
    found[f'ratio_to_{catalogue.REFERENCE}'] = (
      medians[found['peer']] / reference if reference else None
    )


def table(cases: Sequence[Mapping[str, Any]]) -> str:
  """Returns the throughput as a Markdown table, with a row per peer and case."""
  rows = []
  for case in cases:
    for found in case['peers']:
      rows.append(
        [
          case['model'],
          case['num_workers'],
          case['steps_per_execution'],
          found['peer'],
          str(Range(**found['steps_per_s'])),
          round(found['examples_per_s']),
          found[f'ratio_to_{catalogue.REFERENCE}'],
          f'{found["iterations"]} of {found["steps_per_turn"]}',
        ]
      )
  return report.markdown(
    [
      'model',
      'workers',
      'steps a call',
      'peer',
      'steps/s (min-max)',
      'examples/s',
      f'to {catalogue.REFERENCE}',
      'steps counted',
    ],
    rows,
  )
