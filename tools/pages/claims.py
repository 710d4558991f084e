"""Checks sentences of benchmarks/README.md that repeat figures of reports.

A sentence is found by its words. Its figures are compared with the figures of the named
report, rounded to the same digits. If a report is missing, its sentences are not checked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]

_FIGURE = r'(\d[\d,]*(?:\.\d+)?)'
# That has the sentences.
DOCUMENT = 'benchmarks/README.md'


@dataclasses.dataclass(frozen=True)
class Claim:
  """A sentence with figures.

  Attributes:
    words: of the sentence, with `#` for each figure; line breaks are spaces.
    report: the name of the report.
    figures: what they are, by the report.
  """

  words: str
  report: str
  figures: Callable[[Report], Sequence[float]]

  def problem(self, text: str, report: Report) -> str:
    """Describes the error in the sentence. Returns '' if it is right.

    Example:

      >>> claim = Claim('takes # to # ms', 'a', lambda report: report['ms'])
      >>> claim.problem('It takes 1.5 to 1,200 ms.', {'ms': (1.46, 1200.4)})
      ''
      >>> claim.problem('It takes 1.4 to 1,200 ms.', {'ms': (1.46, 1200.4)})
      "'takes 1.4 to 1,200 ms', but a.json has 1.5, 1,200"

    Args:
      text: of the document.
      report: that the figures are from.
    """
    pattern = _FIGURE.join(re.escape(w) for w in self.words.split('#'))
    found = re.search(pattern, ' '.join(text.split()))
    if not found:
      return f'there is no sentence with {self.words!r}'
    try:
      known = [
        f'{value:,.{len(written.partition(".")[2])}f}'
        for value, written in zip(
          self.figures(report), found.groups(), strict=True
        )
      ]
    except (LookupError, TypeError, ValueError, ArithmeticError) as e:
      # Of a run without a peer that the sentence is about.
      return f'{found[0]!r}, of which {self.report}.json has no figures: {e!r}'
    if known == [*found.groups()]:
      return ''
    return f'{found[0]!r}, but {self.report}.json has {", ".join(known)}'


def problems(text: str, reports: Mapping[str, Report]) -> list[str]:
  """Returns the errors in all sentences.

  Args:
    text: of the document.
    reports: by name.
  """
  found = [
    claim.problem(text, reports[claim.report])
    for claim in CLAIMS
    if claim.report in reports
  ]
  return [f'{DOCUMENT}: {problem}' for problem in found if problem]


def _ends(values: Iterable[float]) -> tuple[float, float]:
  known = [*values]
  return min(known), max(known)


def _auto_to_fastest(report: Report) -> Sequence[float]:
  return _ends(
    found['ratio_to_fastest_built_in']
    for found in report['results']
    if found['peer'] == 'AutoAllReduce'
  )


def _between_processes(report: Report) -> Sequence[float]:
  large = [r['ratios'] for r in report['results'] if r['num_bytes'] > 10**7]
  pairs = (
    *('ours_memory/gloo', 'ours_memory/mpich'),
    'ours_in_graph/mwms_ring',
  )
  return [end for pair in pairs for end in _ends(r[pair] for r in large)]


def _peers(report: Report, name: str) -> dict[str, Any]:
  return {found['peer']: found[name] for found in report['results']}


def _recovery(report: Report) -> Sequence[float]:
  [ours] = [f for f in report['results'] if f['peer'] == 'ours']
  return ours['median_s'], ours['kills'], ours['most_s']


def _training_step(report: Report) -> Sequence[float]:
  ratios = _peers(report, 'ratio_to_collective')
  return ratios['ring_8mb'], ratios['no_communication']


def _parameter_server(report: Report) -> Sequence[float]:
  return _ends(
    found['ratio_to_stock']
    for case in report['results']
    for found in case['peers']
    if found['peer'] == 'ours'
  )


CLAIMS = (
  Claim(
    '`AutoAllReduce` takes # to # of the time of the fastest built-in',
    'all_reduce',
    _auto_to_fastest,
  ),
  Claim(
    'next step after # s (median of # kills; at most # s).',
    'recovery',
    _recovery,
  ),
  Claim(
    "25 and 105 MB: # to # of gloo's time, # to # of MPICH's; from a graph # to "
    "# of MultiWorkerMirroredStrategy's",
    'process_all_reduce',
    _between_processes,
  ),
  Claim(
    "on 2 workers: # of the time with MultiWorkerMirroredStrategy's collectives, "
    'where no communication at all would be #.',
    'training_step',
    _training_step,
  ),
  Claim(
    "Parameter servers: # to # times the steps a second of TensorFlow's strategy",
    'parameter_server',
    _parameter_server,
  ),
)
