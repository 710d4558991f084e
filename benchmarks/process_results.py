"""Records and ratios of the results of `process_all_reduce`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks import measure, report
from benchmarks.process_peers import catalogue

# Peers that ours are compared with.
REFERENCES = ('mwms_ring', 'gloo', 'mpich')

# Samples have several calls, so that the barrier does not matter.
_SAMPLE_BYTES = 4 << 20
_MAX_CALLS = 20


@dataclasses.dataclass(frozen=True)
class Size:
  """The measurements of one number of workers and one size.

  Attributes:
    world_size: number of workers.
    num_bytes: size of the reduced float32 array.
    calls: number of calls per sample.
    seconds: seconds per call on the slowest rank: the samples of each peer.
  """

  world_size: int
  num_bytes: int
  calls: int
  seconds: Mapping[str, Sequence[float]]

  def spread(self, peer: str) -> measure.Spread:
    """Returns the median and spread of one peer."""
    return measure.Spread.of(self.seconds[peer])

  def ratios(self) -> dict[str, float]:
    """Returns ratios of our medians to the references', by names like 'ours_tcp/gloo'."""
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
    """Returns all fields and ratios, in the format of the JSON report."""
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
  """Returns the number of calls per sample.

  Example:

    >>> [calls_in_a_sample(n) for n in (4096, 1 << 20, 25_000_000)]
    [20, 4, 1]
  """
  return max(1, min(_MAX_CALLS, _SAMPLE_BYTES // num_bytes))


def size_name(num_bytes: int) -> str:
  """Returns a size as text.

  Example:

    >>> [size_name(n) for n in (512, 4096, 1 << 20, 25_000_000)]
    ['512 B', '4.10 KB', '1.05 MB', '25.00 MB']
  """
  for unit, factor in (('MB', 10**6), ('KB', 10**3)):
    if num_bytes >= factor:
      return f'{num_bytes / factor:.2f} {unit}'
  return f'{num_bytes} B'


def times_table(sizes: Sequence[Size]) -> str:
  """Returns a table of medians with p10 and p90 in ms: rows are sizes, columns peers."""
  peers = _peers(sizes)
  columns = ['size', *peers]
  rows = [
    [size_name(s.num_bytes), *(_cell(s.spread(p)) for p in peers)]
    for s in sizes
  ]
  return report.markdown(columns, rows)


def ratios_table(sizes: Sequence[Size]) -> str:
  """Returns a table of ratios of medians by size, or an empty text without ratios."""
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
