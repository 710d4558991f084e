"""A timeline as a file: PNG by matplotlib, or HTML.

Example:

  >>> from benchmarks.input_pipeline import timeline_plot
  >>> timeline_plot.check('steps.html')
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from benchmarks.input_pipeline import timeline as timeline_lib
from benchmarks.input_pipeline import timeline_svg
from tf_strategies import errors

_INCHES_WIDE = 12.0
_INCHES_A_PIPELINE = 1.9
_DOTS_PER_INCH = 120
_PREP, _TRAIN, _IDLE = '#d98324', '#2f6db3', '#f4c7c7'
_LANE = 0.8
# Narrower boxes, as a share of the picture, have no room for a number.
_NUMBERED = 0.014


def check(path: str) -> None:
  """Refuses a picture that could not be written, before the runs.

  Args:
    path: of the file.

  Raises:
    UnsupportedOptionError: its name ends in neither .png nor .html, or it is a
      PNG and matplotlib is not installed.
  """
  if not path.endswith(('.png', '.html')):
    raise errors.UnsupportedOptionError(
      f'timeline={path!r}',
      'a file that ends in .png or .html',
      'write --timeline=steps.html',
    )
  if path.endswith('.png') and importlib.util.find_spec('matplotlib') is None:
    raise errors.UnsupportedOptionError(
      f'timeline={path!r} without matplotlib',
      'an environment that has it',
      "in the checkout run: pip install '.[benchmarks]'; or write "
      '--timeline=steps.html',
    )


def write(
  path: str, timelines: Mapping[str, timeline_lib.Timeline], title: str
) -> None:
  """Draws when batches were prepared and steps ran, one pipeline below another.

  Args:
    path: ends in .png or .html.
    timelines: by the names of the pipelines.
    title: above them.

  Raises:
    UnsupportedOptionError: as `check`.
  """
  check(path)
  if path.endswith('.html'):
    with open(path, 'w', encoding='utf-8') as f:
      f.write(timeline_svg.render(timelines, title))
    return
  # Only here: it is an extra of this one option.
  from matplotlib import figure

  size = (_INCHES_WIDE, 0.9 + _INCHES_A_PIPELINE * len(timelines))
  picture = figure.Figure(figsize=size, dpi=_DOTS_PER_INCH)
  picture.set_layout_engine('constrained')
  picture.suptitle(title, fontsize=11)
  panels = picture.subplots(len(timelines), 1, sharex=True, squeeze=False)
  longest = 1e3 * max(found.seconds for found in timelines.values())
  for axes, (name, found) in zip(panels[:, 0], timelines.items(), strict=True):
    _draw(axes, found, longest)
    axes.set_title(
      f'{name}: trainer idle {found.idle_share:.0%}', loc='left', fontsize=10
    )
    axes.set_xlim(0, longest)
  panels[-1, 0].set_xlabel('time (ms)')
  _explain(picture)
  picture.savefig(path, format='png')


def _draw(axes, found: timeline_lib.Timeline, longest: float) -> None:
  # Under the steps: what they leave free is idle.
  axes.broken_barh([(0, 1e3 * found.seconds)], (0, _LANE), color=_IDLE)
  lanes = ((1, found.prep, _PREP), (0, found.train, _TRAIN))
  for y, intervals, colour in lanes:
    for number, (begin, end) in enumerate(intervals, 1):
      begin = max(0.0, begin)
      if end <= begin:
        continue  # Prepared before the first step that is shown.
      x, width = 1e3 * begin, 1e3 * (end - begin)
      axes.broken_barh(
        [(x, width)], (y, _LANE), facecolor=colour, edgecolor='white'
      )
      if width / longest > _NUMBERED:
        axes.text(
          x + width / 2,
          y + _LANE / 2,
          str(number),
          ha='center',
          va='center',
          color='white',
          fontsize=7,
        )
  axes.set_yticks([1 + _LANE / 2, _LANE / 2], ['prepare a batch', 'train step'])
  axes.set_ylim(-0.1, 1.9)
  axes.grid(axis='x', alpha=0.3)
  axes.set_axisbelow(True)


def _explain(picture) -> None:
  from matplotlib import patches

  picture.legend(
    handles=[
      patches.Patch(color=_PREP, label='a batch is being prepared'),
      patches.Patch(color=_TRAIN, label='train step'),
      patches.Patch(color=_IDLE, label='trainer idle'),
    ],
    loc='outside lower center',
    ncols=3,
    fontsize=9,
    frameon=False,
  )
