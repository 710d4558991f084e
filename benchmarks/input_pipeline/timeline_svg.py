"""Draws timelines of batches, training steps and idle times as an SVG.

Example:

  >>> from benchmarks.input_pipeline import timeline, timeline_svg
  >>> steps = timeline.Timeline([(0.0, 0.1)], [(0.1, 0.3)], 0.3, 1 / 3)
  >>> picture = timeline_svg.render({'naive': steps}, 'Title')
  >>> 'idle 33%' in picture, picture.count('class="train"')
  (True, 1)
"""

from __future__ import annotations

import html
from collections.abc import Mapping

from benchmarks.input_pipeline import timeline as timeline_lib

_LEFT, _WIDTH, _RIGHT = 150, 900, 20
_LANE, _GAP, _TOP = 26, 46, 70
_TICKS = 8
_STYLE = """
text { font: 13px sans-serif; fill: #222; }
text.number { font-size: 10px; fill: #fff; text-anchor: middle; }
text.lane { text-anchor: end; }
text.name { font-weight: bold; }
.prep { fill: #d98324; stroke: #fff; }
.train { fill: #2f6db3; stroke: #fff; }
.idle { fill: #f4c7c7; }
.tick { stroke: #ddd; }
"""


def render(timelines: Mapping[str, timeline_lib.Timeline], title: str) -> str:
  """Returns an SVG document.

  Args:
    timelines: timelines by the names of the pipelines.
    title: title of the drawing.
  """
  longest = max(found.seconds for found in timelines.values())
  scale = _WIDTH / longest
  height = _TOP + len(timelines) * (2 * _LANE + _GAP) + 30
  parts = [_axis(longest, scale, height)]
  y = _TOP
  for name, found in timelines.items():
    parts.append(_pipeline(name, found, y, scale))
    y += 2 * _LANE + _GAP
  width = _LEFT + _WIDTH + _RIGHT
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    f'role="img"><style>{_STYLE}</style>\n'
    f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
    f'<text class="name" x="20" y="24">{html.escape(title)}</text>\n'
    '<text x="20" y="46">Orange: a batch is being prepared. Blue: a train step. '
    'Red: the trainer is idle.</text>\n' + '\n'.join(parts) + '\n</svg>\n'
  )


def _pipeline(name, found, y, scale) -> str:
  train_y = y + 20 + _LANE
  lines = [
    f'<text class="name" x="{_LEFT}" y="{y + 14}">{html.escape(name)}: '
    f'trainer idle {found.idle_share:.0%}</text>',
    f'<text class="lane" x="{_LEFT - 8}" y="{y + 38}">prepare a batch</text>',
    f'<text class="lane" x="{_LEFT - 8}" y="{train_y + 18}">train step</text>',
    # The steps cover it, so that only idle time stays visible.
    _box('idle', 0.0, found.seconds, train_y, scale),
  ]
  for number, (begin, end) in enumerate(found.prep, 1):
    lines.append(_box('prep', begin, end, y + 20, scale, number))
  for number, (begin, end) in enumerate(found.train, 1):
    lines.append(_box('train', begin, end, train_y, scale, number))
  return '\n'.join(line for line in lines if line)


def _box(kind, begin, end, y, scale, number=None) -> str:
  begin = max(0.0, begin)
  if end <= begin:
    return ''  # Prepared before the first drawn step.
  x, width = _LEFT + begin * scale, (end - begin) * scale
  text = (
    f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.2f}" '
    f'height="{_LANE - 3}"/>'
  )
  if number is not None and width > 16:
    text += (
      f'<text class="number" x="{x + width / 2:.1f}" y="{y + 15}">{number}'
      '</text>'
    )
  return text


def _axis(longest, scale, height) -> str:
  lines = []
  for tick in range(_TICKS + 1):
    seconds = longest * tick / _TICKS
    x = _LEFT + seconds * scale
    lines.append(
      f'<line class="tick" x1="{x:.1f}" y1="{_TOP - 10}" x2="{x:.1f}" '
      f'y2="{height - 24}"/><text x="{x - 14:.1f}" y="{height - 8}">'
      f'{1e3 * seconds:.0f} ms</text>'
    )
  return '\n'.join(lines)
