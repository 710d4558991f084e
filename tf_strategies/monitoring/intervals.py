"""Operations on sets of time, as lists of intervals.

Example:

  >>> from tf_strategies.monitoring import intervals
  >>> busy = intervals.union([(0, 4), (3, 6), (8, 9)])
  >>> busy, intervals.length(busy)
  ([(0, 6), (8, 9)], 7)
  >>> intervals.subtract((2, 10), busy)
  [(6, 8), (9, 10)]
"""

from collections.abc import Iterable

Interval = tuple[int, int]


def union(parts: Iterable[Interval]) -> list[Interval]:
  """The same times as disjoint intervals, in order."""
  merged: list[Interval] = []
  for begin, end in sorted(parts):
    if end <= begin:
      continue
    if merged and begin <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end))
    else:
      merged.append((begin, end))
  return merged


def clip(parts: Iterable[Interval], whole: Interval) -> list[Interval]:
  """What of `parts` lies inside `whole`."""
  begin, end = whole
  clipped = [(max(b, begin), min(e, end)) for b, e in parts]
  return [(b, e) for b, e in clipped if b < e]


def subtract(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
  """What of `whole` lies in none of `parts`."""
  left, at = [], whole[0]
  for begin, end in union(clip(parts, whole)):
    if at < begin:
      left.append((at, begin))
    at = end
  if at < whole[1]:
    left.append((at, whole[1]))
  return left


def intersect(
  parts: Iterable[Interval], others: Iterable[Interval]
) -> list[Interval]:
  """What of `parts` lies in one of the others.

  Example:

    >>> intersect([(0, 4), (6, 9)], [(2, 7), (8, 20)])
    [(2, 4), (6, 7), (8, 9)]
  """
  others = list(others)
  return union(piece for part in parts for piece in clip(others, part))


def cut(parts: Iterable[Interval], at: Iterable[int]) -> list[Interval]:
  """The same times, split at the moments `at`."""
  pieces = []
  for begin, end in parts:
    ends = [t for t in sorted(set(at)) if begin < t < end]
    pieces += zip([begin, *ends], [*ends, end], strict=True)
  return pieces


def length(parts: Iterable[Interval]) -> int:
  """The total length of disjoint intervals."""
  return sum(end - begin for begin, end in parts)
