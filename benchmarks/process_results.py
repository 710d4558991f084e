"""What a run of `process_all_reduce` found: records and ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks import measure, report
from benchmarks.process_peers import catalogue

# What ours are compared with.
REFERENCES = ('mwms_ring', 'gloo', 'mpich')

# Enough calls in a sample that starting together does not count.
_SAMPLE_BYTES = 4 << 20
_MOST_CALLS = 20


@dataclasses.dataclass(frozen=True)
class Size:
  """All that was measured with one number of workers and one size.

  Attributes:
    world_size: number of workers.
    num_bytes: of the float32 array that is reduced.
    calls: in a row in each sample.
    seconds: samples of each peer: of a call, on the slowest rank.
  """

  world_size: int
  num_bytes: int
  calls: int
  seconds: Mapping[str, Sequence[float]]

  def spread(self, peer: str) -> measure.Spread:
    """Median and spread of one peer."""
    return measure.Spread.of(self.seconds[peer])

  def ratios(self) -> dict[str, float]:
    """Returns our medians divided by the references', as 'ours_tcp/gloo' and so on."""
    ours = [
      e.name
      for e in catalogue.ENTRIES
      if e.kind == catalogue.OURS and e.name in self.seconds
    ]
    return {
      f'{name}/{reference}': self.spread(name).median_ms
      / self.spread(reference).median_ms
      for reference in REFERENCES
      if reference in self.seconds
      for name in ours
    }

  def record(self) -> dict[str, object]:
    """Returns everything, as the JSON report has it."""
    bus_bytes = 2 * (self.world_size - 1) / self.world_size * self.num_bytes
    peers = {}
    for name, seconds in self.seconds.items():
      spread = self.spread(name)
      peers[name] = {
        **dataclasses.asdict(spread),
        'bus_bandwidth_gb_per_s': bus_bytes / spread.median_ms / 1e6,
        'seconds': list(seconds),
      }
    return {
      'world_size': self.world_size,
      'num_bytes': self.num_bytes,
      'calls_in_a_sample': self.calls,
      'peers': peers,
      'ratios': self.ratios(),
    }


def calls_in_a_sample(num_bytes: int) -> int:
  """Returns how many calls in a row are timed as one.

  Example:

    >>> [calls_in_a_sample(n) for n in (4096, 1 << 20, 25_000_000)]
    [20, 4, 1]
  """
  return max(1, min(_MOST_CALLS, _SAMPLE_BYTES // num_bytes))


def size_name(num_bytes: int) -> str:
  """Returns a size for tables.

  Example:

    >>> [size_name(n) for n in (512, 4096, 1 << 20, 25_000_000)]
    ['512 B', '4.10 KB', '1.05 MB', '25.00 MB']
  """
  for unit, factor in (('MB', 10**6), ('KB', 10**3)):
    if num_bytes >= factor:
      return f'{num_bytes / factor:.2f} {unit}'
  return f'{num_bytes} B'


def times_table(sizes: Sequence[Size]) -> str:
  """Returns medians with p10 and p90 in ms: a row a size, a column a peer."""
  peers = _peers(sizes)
  columns = ['size', *peers]
  rows = [
    [size_name(s.num_bytes), *(_cell(s.spread(p)) for p in peers)]
    for s in sizes
  ]
  return report.markdown(columns, rows)


def ratios_table(sizes: Sequence[Size]) -> str:
  """Returns the ratios of medians: a row a size; empty if there are none."""
  names = list(sizes[0].ratios())
  if not names:
    return ''
  return report.markdown(
    ['size', *names],
    [[size_name(s.num_bytes), *s.ratios().values()] for s in sizes],
  )


def _peers(sizes: Sequence[Size]) -> list[str]:
  return [n for n in catalogue.NAMES if n in sizes[0].seconds]


def _cell(spread: measure.Spread) -> str:
  return f'{spread.median_ms:.3g} ({spread.p10_ms:.3g}-{spread.p90_ms:.3g})'
