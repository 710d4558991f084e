"""Draws some steps of a merged timeline: needs matplotlib.

  tfs timeline plot run.json run.png --step=8

Two rows for each task: the step (input, compute, waiting) and below it the
collectives, one bar for each bucket. Without --step, a step of the middle.
"""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from tf_strategies import errors, option_checks
from tf_strategies.cluster import command_line
from tf_strategies.monitoring import merge, recorder, step_breakdown, timeline

_FLAGS = (
  ('step', int, 'The first step; default: the middle.'),
  ('steps', 1, 'How many steps.'),
)
_INCHES_WIDE = 13.0
_INCHES_A_TASK = 1.7
_DOTS_PER_INCH = 120
_LANE = 0.8
_COLOURS = {
  recorder.INPUT: '#8a8a8a',
  step_breakdown.FORWARD: '#2f6db3',
  step_breakdown.BACKWARD: '#5aa469',
  step_breakdown.UPDATE: '#7b62a3',
  step_breakdown.COMPUTE: '#2f6db3',
  recorder.WAIT: '#e8b4b4',
}
_BUCKET, _OTHER = '#d98324', '#b9b9b9'
_LEGEND = (
  (_COLOURS[recorder.INPUT], 'input: waiting for the batch'),
  *(
    (_COLOURS[part], f'compute: {part}')
    for part in (
      step_breakdown.FORWARD,
      step_breakdown.BACKWARD,
      step_breakdown.UPDATE,
    )
  ),
  (_COLOURS[recorder.WAIT], 'waiting for collectives'),
  (_BUCKET, 'bucket of gradients on its way'),
  (_OTHER, 'another collective'),
)
# Narrower bars, as a share of the figure, have no room for a number.
_NUMBERED = 0.012


def draw(
  trace: dict[str, Any], path: str, step: int | None = None, steps: int = 1
) -> None:
  """Draws so many steps of all tasks, from `step` or in the middle, as a PNG.

  Raises:
    UnsupportedOptionError: matplotlib is not installed.
    DataError: no task has such a step.
  """
  if importlib.util.find_spec('matplotlib') is None:
    raise errors.UnsupportedOptionError(
      'a plot without matplotlib',
      'an environment that has it',
      "in the checkout run: pip install '.[benchmarks]'",
    )
  # Only here: it is an extra of this one command.
  from matplotlib import figure, patches

  spans = [e for e in trace['traceEvents'] if e['ph'] == 'X']
  shown, (begin, end) = _window(spans, step, steps)
  tasks = sorted({e['pid'] for e in spans})
  size = (_INCHES_WIDE, 1.6 + _INCHES_A_TASK * len(tasks))
  plot = figure.Figure(figsize=size, dpi=_DOTS_PER_INCH)
  plot.set_layout_engine('constrained')
  until = f' to {shown[-1]}' if len(shown) > 1 else ''
  plot.suptitle(f'Step {shown[0]}{until} of {len(tasks)} tasks', fontsize=11)
  panels = plot.subplots(len(tasks), 1, sharex=True, squeeze=False)[:, 0]
  for axes, task in zip(panels, tasks, strict=True):
    mine = [
      e
      for e in spans
      if e['pid'] == task and e['ts'] < end and e['ts'] + e['dur'] > begin
    ]
    _draw_task(axes, mine, begin, end)
    axes.set_title(f'rank {task}', loc='left', fontsize=10)
  panels[-1].set_xlabel('time (ms)')
  plot.legend(
    handles=[patches.Patch(color=c, label=text) for c, text in _LEGEND],
    loc='outside lower center',
    ncols=3,
    fontsize=8,
    frameon=False,
  )
  plot.savefig(path, format='png')


def _window(spans, step, steps):
  """The steps to show, and their begin and end."""
  whole = [e for e in spans if e['cat'] == recorder.STEP]
  numbers = sorted({e['args']['step'] for e in whole})
  if not numbers:
    raise errors.DataError('the timeline has no step; expected at least one')
  if step is None:
    step = numbers[len(numbers) // 2]
  shown = [n for n in numbers if step <= n < step + steps]
  if not shown:
    raise errors.DataError(
      f'the timeline has no step {step}; expected one of {numbers[0]} to '
      f'{numbers[-1]}'
    )
  chosen = [e for e in whole if e['args']['step'] in shown]
  begin = min(e['ts'] for e in chosen)
  end = max(e['ts'] + e['dur'] for e in chosen)
  margin = 0.01 * (end - begin)
  return shown, (begin - margin, end + margin)


def _draw_task(axes, spans, begin, end):
  def bar(event, y, colour, number=''):
    """Draws an event, with its number where there is room."""
    x, width = (event['ts'] - begin) / 1e3, event['dur'] / 1e3
    axes.broken_barh(
      [(x, width)], (y, _LANE), facecolor=colour, edgecolor='white', lw=0.6
    )
    if number and width * 1e3 / (end - begin) > _NUMBERED:
      axes.text(
        x + width / 2,
        y + _LANE / 2,
        number,
        ha='center',
        va='center',
        color='white',
        fontsize=7,
        clip_on=True,
      )

  for event in spans:
    lane = timeline.LANES[event['tid']]
    if lane == 'step' and event['cat'] != recorder.STEP:
      key = event['name'] if event['cat'] == 'compute' else event['cat']
      bar(event, 1, _COLOURS[key])
    elif lane == 'collectives':
      _, found, number = event['name'].rpartition('bucket_')
      bar(event, 0, _BUCKET if found else _OTHER, number if found else '')
  axes.set_yticks([1 + _LANE / 2, _LANE / 2], ['step', 'collectives'])
  axes.set_ylim(-0.1, 1.9)
  axes.set_xlim(0, (end - begin) / 1e3)
  axes.grid(axis='x', alpha=0.3)
  axes.set_axisbelow(True)


def _run(values: flags.FlagValues, paths: list[str]) -> int:
  if len(paths) != 2:
    raise flags.Error('expected a timeline and a PNG: run.json run.png')
  option_checks.check_int('--steps', values.steps, 1)
  try:
    draw(merge.load(paths[0]), paths[1], values.step, values.steps)
  except errors.Error as e:
    print(e, file=sys.stderr)
    return 1
  return 0


def main(argv: Sequence[str]) -> int:
  """Draws the timeline that `argv` names."""
  return command_line.main(
    argv,
    'tf_strategies.monitoring.plot',
    __doc__,
    _FLAGS,
    _run,
    'run.json run.png',
  )


if __name__ == '__main__':
  sys.exit(main(sys.argv))
