"""Draws a `Schedule` as SVG: ranks from top to bottom, rounds from left to right.

Example:

  >>> from tf_strategies.collectives.algorithms import ring
  >>> drawn = draw(ring.ring_all_reduce(3))
  >>> drawn.count('<g '), drawn.count('<line')
  (12, 3)
"""

from __future__ import annotations

import collections

from tf_strategies.collectives import schedule as schedule_lib

_LEFT, _TOP, _BOTTOM, _RIGHT = 56, 26, 14, 14
_ROW, _COLUMN = 46, 92
_ARROW = 7
# Told apart on white and on black, and by those who see few colours.
_HUES = (210, 30, 150, 330, 265, 60, 190, 0)


def draw(schedule: schedule_lib.Schedule) -> str:
  """Draws one arrow per transfer: solid if it is added, dashed if it is copied."""
  rounds, ranks = schedule.num_rounds, schedule.world_size
  width = _LEFT + rounds * _COLUMN + _RIGHT
  height = _TOP + (ranks - 1) * _ROW + _BOTTOM
  parts = [
    f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
    f'aria-label="{schedule.name} all-reduce of {ranks} ranks">'
  ]
  for rank in range(ranks):
    y = _TOP + rank * _ROW
    parts.append(f'<text x="4" y="{y + 4}">rank {rank}</text>')
    parts.append(
      f'<line x1="{_LEFT}" y1="{y}" x2="{width - _RIGHT}" y2="{y}"/>'
    )
  for index in range(rounds):
    x = _LEFT + (index + 0.5) * _COLUMN
    parts.append(f'<text x="{x:g}" y="11" text-anchor="middle">{index}</text>')
  # Transfers between the same ranks in the same round are one arrow.
  messages: dict[tuple[int, int, int, bool], list[int]] = {}
  for t in schedule.transfers:
    key = (t.round, t.src, t.dst, t.reduce)
    messages.setdefault(key, []).append(t.chunk)
  sent = collections.Counter(key[:2] for key in messages)
  for (index, src, dst, reduce), chunks in messages.items():
    # Numbers of many arrows from one place would cover each other.
    label = ','.join(map(str, chunks)) if sent[index, src] < 3 else ''
    hue = _HUES[chunks[0] % len(_HUES)]
    parts.append(_arrow(index, src, dst, reduce, hue, label))
  return ''.join([*parts, '</svg>'])


def _arrow(
  index: int, src: int, dst: int, reduce: bool, hue: int, label: str
) -> str:
  x1 = _LEFT + index * _COLUMN + 8
  x2 = _LEFT + (index + 1) * _COLUMN - 8
  y1, y2 = _TOP + src * _ROW, _TOP + dst * _ROW
  length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
  dx, dy = (x2 - x1) / length, (y2 - y1) / length
  bx, by = x2 - _ARROW * dx, y2 - _ARROW * dy
  head = (
    f'M{x2:.1f} {y2:.1f}'
    f'L{bx - 3 * dy:.1f} {by + 3 * dx:.1f}'
    f'L{bx + 3 * dy:.1f} {by - 3 * dx:.1f}Z'
  )
  # Near its sender, beside the arrow: further on arrows cross.
  x, y = x1 + 17 * dx + (8 if dy < 0 else 4), y1 + 17 * dy - 3
  kind = 'add' if reduce else 'copy'
  return (
    f'<g class="{kind}" style="--hue: {hue}">'
    f'<path d="M{x1:.1f} {y1:.1f}L{bx:.1f} {by:.1f}"/>'
    f'<path class="head" d="{head}"/>'
    f'<text x="{x:.1f}" y="{y:.1f}">'
    f'{label}</text></g>'
  )


def figure(schedule: schedule_lib.Schedule) -> str:
  """Returns the drawing with its costs, as HTML without empty lines."""
  ranks = schedule.world_size
  sent = collections.Counter(t.src for t in schedule.transfers)
  sent = max(sent.values()) / schedule.num_chunks
  return (
    f'<figure class="schedule">{draw(schedule)}<figcaption>'
    f'<code>{schedule.name}</code>, {ranks} ranks: {schedule.num_rounds} '
    f'rounds; {sent:.3g} times the buffer leaves the busiest rank'
    '</figcaption></figure>'
  )
