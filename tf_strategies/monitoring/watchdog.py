"""Names the stalled rank when no step finishes.

A thread of this process watches the time. When a step is late, it reports what
this rank is doing, what the others answer, and the stack of each Python thread;
every rank has such a thread, so its stacks are in its own log. The watchdog ends
nothing: the group's own deadlines do that.

Example:

  >>> from tf_strategies.monitoring import watchdog
  >>> said = {0: {'sequence': 7, 'busy': True, 'name': 'reduce/bucket_2',
  ...             'text': "all_reduce(sum) 'reduce/bucket_2'", 'seconds': 9.0,
  ...             'note': 'step 3'},
  ...         1: {'sequence': 6, 'busy': False, 'name': 'reduce/bucket_1',
  ...             'text': "all_reduce(sum) 'reduce/bucket_1'", 'seconds': 0.0,
  ...             'note': 'step 3'}}
  >>> print(watchdog.explain(0, ['rank 0', 'rank 1'], said))
  rank 0 waits in step 3 for "reduce/bucket_2": all_reduce(sum) 'reduce/bucket_2' (sequence 7), for 9.0 s
  rank 1 has not reached it: in step 3, its last was all_reduce(sum) 'reduce/bucket_1' (sequence 6)
  stalled: rank 1
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

# A step that is still late is reported again, each time after twice as long.
_MORE_PATIENCE = 2.0
_JOIN_SECONDS = 5.0


class Watchdog:
  """Writes a report when no step has finished in time.

  Args:
    seconds: how long a step may take before the first report.
    describe: returns the report's text about the ranks; None to pause until
      another step begins.
    path: a file for the reports beside standard error.
  """

  def __init__(
    self,
    seconds: float,
    describe: Callable[[], str | None],
    path: str | None = None,
  ):
    self._seconds = seconds
    self._describe = describe
    self._path = path
    self._finished = time.monotonic()
    self._told = 0
    self._is_paused = False
    self._lock = threading.Lock()
    self._is_over = threading.Event()
    self._thread = threading.Thread(
      target=self._watch, name='watchdog', daemon=True
    )
    self._thread.start()

  def step_began(self) -> None:
    """Resumes after a pause."""
    if self._is_paused:
      with self._lock:
        self._finished, self._told = time.monotonic(), 0
        self._is_paused = False

  def pause(self) -> None:
    """Pauses until another step begins."""
    with self._lock:
      self._is_paused = True

  def step_finished(self) -> None:
    """Restarts the deadline."""
    with self._lock:
      before, self._finished = self._finished, time.monotonic()
      was_told, self._told = self._told, 0
      self._is_paused = False
    if was_told:
      late = self._finished - before
      self._write(f'watchdog: steps resumed after {late:.1f} s.\n', False)

  def close(self) -> None:
    """Ends the thread."""
    self._is_over.set()
    if threading.current_thread() is not self._thread:
      self._thread.join(_JOIN_SECONDS)

  def _watch(self) -> None:
    while True:
      with self._lock:
        finished = self._finished
        patience = self._seconds * _MORE_PATIENCE**self._told
        is_paused = self._is_paused
      left = finished + patience - time.monotonic()
      if self._is_over.wait(self._seconds if is_paused else max(left, 0.01)):
        return
      late = time.monotonic() - finished
      with self._lock:
        # Not of a step that finished during the wait, such as after a pause.
        is_late = late >= patience and self._finished == finished
        is_late = is_late and not self._is_paused
      if is_late:
        self._report(finished, late)

  def _report(self, finished: float, late: float) -> None:
    try:
      said = self._describe()
    except Exception as e:
      # The group may be closing; the stacks are still useful.
      said = f'the state of the ranks is unknown ({type(e).__name__}: {e})'
    with self._lock:
      if self._finished != finished:  # A step finished meanwhile.
        return
      if said is None:
        self._is_paused = True
        return
      self._told += 1
    threads = ', '.join(
      f'{thread.name} is 0x{thread.ident:x}'
      for thread in threading.enumerate()
      if thread.ident is not None
    )
    self._write(
      f'watchdog: no step has finished for {late:.1f} s.\n'
      + ''.join(f'  {line}\n' for line in said.splitlines())
      + f'  The stacks of process {os.getpid()}; thread {threads}:\n',
      True,
    )

  def _write(self, text: str, with_stacks: bool) -> None:
    # Not sys.stderr: faulthandler needs a file descriptor.
    self._write_to(sys.__stderr__, text, with_stacks)
    if self._path is None:
      return
    os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
    with open(self._path, 'a', encoding='utf-8') as f:
      self._write_to(f, text, with_stacks)

  def _write_to(self, file: TextIO | None, text, with_stacks) -> None:
    if file is None:
      return
    file.write(text)
    file.flush()
    if with_stacks:
      faulthandler.dump_traceback(file, all_threads=True)


def explain(
  rank: int, names: Sequence[str], said: Mapping[int, Mapping[str, Any]]
) -> str:
  """A line about each rank, and the stalled ones.

  Args:
    rank: of this process.
    names: of the ranks.
    said: `ProcessGroup.describe()` of each rank that answered.
  """
  asked = range(len(names)) if rank == 0 else sorted({0, rank})
  newest = max(d['sequence'] for d in said.values())
  is_waited_for = any(
    d['busy'] and d['sequence'] == newest for d in said.values()
  )
  tags = sorted({tag for d in said.values() for tag in d.get('exchanges', ())})
  lines, late = [], []
  for r in asked:
    if r not in said:
      lines.append(f'{names[r]} does not answer: it is stopped or disconnected')
      late.append(names[r])
      continue
    line, is_late = _position(said[r], newest)
    met, is_late_there = _meetings(said[r], tags)
    lines.append(f'{names[r]} {line}{met}')
    if (is_late and is_waited_for) or is_late_there:
      late.append(names[r])
  if late:
    lines.append(f'stalled: {", ".join(late)}')
  elif is_waited_for or tags:
    lines.append(
      'all ranks that were asked are in it: no data arrives, or another rank '
      'stalls'
    )
  else:
    # Waiting for a batch, for example.
    lines.append('no rank waits for another: see the stacks')
  if len(asked) < len(names):
    lines.append('rank 0 asks all ranks: see its log')
  return '\n'.join(lines)


def _meetings(description, tags) -> tuple[str, bool]:
  """Describes the exchanges of a rank; and whether it misses one of `tags`."""
  own = description.get('exchanges', {})
  parts = [
    f'; waits for all ranks in exchange "{tag}", for {seconds:.1f} s'
    for tag, seconds in sorted(own.items())
  ]
  missing = [tag for tag in tags if tag not in own]
  parts += [f'; has not reached exchange "{tag}"' for tag in missing]
  return ''.join(parts), bool(missing)


def _position(description, newest: int) -> tuple[str, bool]:
  """Describes where a rank is; and whether others are ahead."""
  step = description['note'] or 'an unknown step'
  what = f'{description["text"]} (sequence {description["sequence"]})'
  if description['busy']:
    line = (
      f'waits in {step} for "{description["name"]}": {what}, for '
      f'{description["seconds"]:.1f} s'
    )
    return line, description['sequence'] < newest
  if description['sequence'] < newest:
    return f'has not reached it: in {step}, its last was {what}', True
  return f'is in no collective: in {step}, its last was {what}', False
