"""Speed, and how the test loss falls, as a picture."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from benchmarks.strategy_costs import results
from tf_strategies import errors

_INCHES = (11.0, 4.8)
_DOTS_PER_INCH = 130


def check_installed(path: str) -> None:
  """Refuses to plot where that is not possible.

  Args:
    path: of the picture.

  Raises:
    UnsupportedOptionError: matplotlib is not installed, the file's name does
      not end in .png, or its directory does not exist.
  """
  if not path.endswith('.png'):
    raise errors.UnsupportedOptionError(
      f'plot={path!r}', 'a file that ends in .png', 'write --plot=scaling.png'
    )
  directory = os.path.dirname(os.path.abspath(path))
  if not os.path.isdir(directory):
    raise errors.UnsupportedOptionError(
      f'plot={path!r}',
      'a file in a directory that exists',
      f'run: mkdir -p {directory}',
    )
  if importlib.util.find_spec('matplotlib') is None:
    raise errors.UnsupportedOptionError(
      f'plot={path!r} without matplotlib',
      'an environment that has it',
      "in the checkout run: pip install '.[benchmarks]'; or leave --plot out",
    )


def write(
  path: str, rows: Sequence[results.Rows], target: float, title: str
) -> None:
  """Writes what `draw` draws as PNG.

  Args:
    path: of the picture.
    rows: one a configuration.
    target: a test loss.
    title: above both panels.
  """
  draw(rows, target, title).savefig(path, format='png')


def draw(rows: Sequence[results.Rows], target: float, title: str):
  """Returns a figure of two panels: images/s, and test loss over seconds.

  Args:
    rows: one a configuration; those that failed are left out.
    target: a test loss, which is marked.
    title: above both.
  """
  # Only here: it is an extra of this one option.
  from matplotlib import figure

  rows = [row for row in rows if not row.error]
  picture = figure.Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH)
  picture.set_layout_engine('constrained')
  picture.suptitle(title, fontsize=10)
  speed, loss = picture.subplots(1, 2, width_ratios=[2, 3])
  colours = [f'C{i}' for i in range(len(rows))]
  _draw_speed(speed, rows, colours)
  _draw_loss(loss, rows, colours, target)
  return picture


def _draw_speed(axes, rows, colours) -> None:
  """A bar a configuration, with the range of its rounds."""
  places = range(len(rows))
  for place, row, colour in zip(places, rows, colours, strict=True):
    rates = [found['images_per_s'] for found in row.runs]
    middle = row.median('images_per_s')
    spread = None
    if len(rates) > 1:
      spread = [[middle - min(rates)], [max(rates) - middle]]
    axes.barh(place, middle, color=colour, xerr=spread, capsize=3)
  axes.set_yticks(list(places), [row.job.name for row in rows])
  axes.invert_yaxis()  # In the order of the table.
  axes.set_xlabel('speed (images/s)')
  axes.grid(axis='x', alpha=0.3)
  axes.set_axisbelow(True)


def _draw_loss(axes, rows, colours, target) -> None:
  """A curve a round; those after the first are pale."""
  for row, colour in zip(rows, colours, strict=True):
    for number, found in enumerate(row.runs):
      seconds, losses = zip(*found['curve'], strict=True)
      axes.plot(
        seconds,
        losses,
        color=colour,
        marker='.',
        markersize=4,
        linewidth=1.2,
        alpha=1.0 if number == 0 else 0.3,
        label=row.job.name if number == 0 else None,
      )
  axes.axhline(
    target, color='black', linestyle='--', label=f'target {target:g}'
  )
  axes.set_yscale('log')
  axes.set_xlabel('training time (s)')
  axes.set_ylabel('test loss (cross-entropy, nats)')
  axes.grid(which='both', alpha=0.3)
  axes.legend(fontsize=8)
