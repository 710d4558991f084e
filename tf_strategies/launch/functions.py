"""`tfs.launch(function)`: a function on several workers, from a notebook or script.

Each worker is a process that the launcher starts, as `tfs launch` would: what runs
under one runs under the other. The function travels as bytes in a file; so do results.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import pickle
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from tf_strategies import errors, option_checks
from tf_strategies.cluster import ClusterConfig, launcher_note
from tf_strategies.launch import command, output, process

if TYPE_CHECKING:
  from typing_extensions import Unpack

_LAUNCHER = 'tf_strategies.launch'
_CALL, _RESULT = 'call', 'result'
_NOTHING = object()  # A result that was expected and has not come.
_SENDABLE = 'return numbers, NumPy arrays or a path'
_POLL_SECONDS = 1.0
# The launcher itself ends its tasks within its own grace period.
_GRACE_SECONDS = 30.0
_FIX = 'see `tfs launch --help`'
# Of the launcher, for a wrong command line; it then writes its usage last.
_REFUSED, _USAGE = 2, 'Usage: '
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


class Flags(TypedDict, total=False):
  """The flags of `tfs launch` besides `num_workers`, for checkers."""

  num_ps: int
  chief: bool
  evaluator: bool
  max_restarts: int
  log_dir: str | os.PathLike[str] | None
  tee: bool
  rank_filter: str | None
  grace_period: float
  dry_run: bool
  nnodes: int
  node_rank: int
  rendezvous: str | None
  rendezvous_timeout: float


def launch(
  function: Callable[..., Any],
  args: tuple[Any, ...] | list[Any] = (),
  *,
  num_workers: int = 2,
  **flags: Unpack[Flags],
) -> list[Any]:
  """Calls a function on each worker of a new job, and returns what each returned.

  The workers are processes of their own, without what this one has loaded, so it
  does not matter whether TensorFlow was used here. What they write appears here, with
  `[worker 0]` before each line.

  A function of a module travels by name, so workers import that module. One of a
  notebook, and one inside of another function, is sent whole, by cloudpickle: `pip
  install '.[notebook]'`. A script that calls this must do so under
  `if __name__ == '__main__':`, since workers run the script for its functions.

  Args:
    function: whose strategy finds the other workers by TF_CONFIG.
    args: its arguments, for all workers alike.
    num_workers: how many.
    **flags: of `tfs launch`, such as `max_restarts=1` or `log_dir='logs'`.

  Returns:
    What chief and workers returned, in this order. Workers that serve a chief
    beside parameter servers return nothing. A worker that an elastic job lost
    returns None.

  Raises:
    UnsupportedOptionError: an unknown flag or a wrong value of one, no function,
      or one that cannot be sent.
    WorkerUnavailableError: a worker failed, was killed, or ended its process
      before it returned; caused by what the function raised there, if it raised.

  Example:

    >>> import math
    >>> from tf_strategies.launch import functions
    >>> functions.launch(math.hypot, args=(3, 4), num_workers=2)
    [5.0, 5.0]
  """
  option_checks.check_function(
    'function',
    function,
    'pass the function itself, and its arguments apart: '
    'tfs.launch(train, args=(3,))',
  )
  option_checks.check_type(
    'args',
    args,
    (tuple, list),
    "a tuple of the function's arguments",
    'write args=(value,) for one argument',
  )
  words = _words({'num_workers': num_workers, **flags})
  with tempfile.TemporaryDirectory(prefix='tfs-launch-') as name:
    directory = pathlib.Path(name)
    (directory / _CALL).write_bytes(_packed(function, tuple(args)))
    runner = ['-m', 'tf_strategies.launch.functions', name]
    python = [sys.executable, '-u']
    status, tail, is_elastic = _run(
      [*python, '-m', _LAUNCHER, *words, '--', *python, *runner]
    )
    results = _results(directory)
  if status == _REFUSED and tail.rpartition('\n')[2].startswith(_USAGE):
    # The lines of tasks begin with their names: it is the launcher that ends so.
    _, _, refusal = tail.rpartition(f'{_LAUNCHER}: ')
    raise errors.UnsupportedOptionError(refusal.partition(f'\n{_USAGE}')[0])
  if status:
    raised = [e for e in results.values() if isinstance(e, BaseException)]
    raise errors.WorkerUnavailableError(
      f'The job of {function!r} ended with {output.ending(status)}. It wrote '
      f'last:\n{tail}'
    ) from (raised[0] if raised else None)
  if is_elastic:
    if flags.get('nnodes', 1) == 1:
      # Also those that were lost before they began.
      count = num_workers + bool(flags.get('chief'))
      results = {place: results.get(place, _NOTHING) for place in range(count)}
    results = {place: _or_none(result) for place, result in results.items()}
  missing = [rank for rank, result in results.items() if result is _NOTHING]
  if missing:
    raise errors.WorkerUnavailableError(
      f'The job of {function!r} ended well, but nothing came back from rank '
      f'{", ".join(map(str, missing))} of {len(results)}. Expected a function '
      'that returns. Fix: return, or raise sys.exit(0), instead of os._exit(0).'
    )
  for result in results.values():
    if isinstance(result, _UnreadableError):
      raise errors.WorkerUnavailableError(str(result))
  return list(results.values())


class _UnreadableError(errors.WorkerUnavailableError):
  """In the place of what a worker returned or raised, and this process cannot make."""


def _or_none(result: Any) -> Any:
  """Returns the result of a worker of an elastic job; None if it was lost."""
  is_readable = not isinstance(result, _UnreadableError)
  is_error = isinstance(result, BaseException) and is_readable
  return None if is_error or result is _NOTHING else result


def _words(flags: Mapping[str, Any]) -> list[str]:
  """The launcher's command line, if all flags have the types of its own."""
  known = ('num_workers', *Flags.__annotations__)
  option_checks.check_names('tfs.launch', flags, known, _FIX)
  defaults = {name: default for name, default, _ in command.FLAGS}
  words = []
  for name, value in flags.items():
    default = defaults[name]
    if value is None and default is None:
      continue
    if isinstance(default, bool):
      option_checks.check_bool(name, value)
    elif isinstance(default, int):
      option_checks.check_int(name, value, 0)
    elif isinstance(default, float):
      option_checks.check_seconds(name, value, or_zero=True)
    elif name == 'log_dir':
      option_checks.check_path(name, value, "write log_dir='logs', or None")
    else:
      is_text = isinstance(value, str)
      option_checks.check(is_text, f'{name}={value!r}', 'a string', _FIX)
    words.append(f'--{name}={value}')
  return words


def _packed(function, args) -> bytes:
  """Returns the call as bytes, for a worker."""
  name = getattr(function, '__qualname__', '')
  module = getattr(function, '__module__', None) or ''
  home = sys.modules.get(module)
  is_of_main = home is sys.modules['__main__']
  if module == '__mp_main__' and not is_of_main:
    raise errors.UnsupportedOptionError(
      f'launch of {name} while a worker reads the script for its functions',
      'a script that launches only where it is the program',
      "call tfs.launch under: if __name__ == '__main__':",
    )
  main = _main_script()
  is_named = name and '<' not in name and (main or not is_of_main)
  pack: Any = pickle
  if not is_named:
    if importlib.util.find_spec('cloudpickle') is None:
      raise errors.UnsupportedOptionError(
        f'the function {name or function!r} without cloudpickle',
        'a function of a module, or cloudpickle to send one of a notebook',
        "in the checkout run: pip install '.[notebook]', or put it into a module",
      )
    import cloudpickle as pack
  try:
    call = pack.dumps((function, args))
  # Whatever an argument's own code raises.
  except Exception as e:
    raise errors.UnsupportedOptionError(
      f'launch of {name or function!r} ({type(e).__name__}: {e})',
      'a function and arguments that can be sent to another process',
      'make in the function what cannot, such as models, data sets and strategies',
    ) from e
  script = main if is_of_main and is_named else {}
  return pickle.dumps((sys.path, script, call))


def _main_script() -> dict[str, str]:
  """How workers get this program's own functions, as multiprocessing says it."""
  main = sys.modules['__main__']
  name = getattr(getattr(main, '__spec__', None), 'name', None)
  if name and not name.endswith('__main__'):  # By `python -m`.
    return {'init_main_from_name': name}
  path = getattr(main, '__file__', None)
  if path is None or not os.path.isfile(path):  # A notebook, or stdin.
    return {}
  return {'init_main_from_path': path}


def _run(words: Sequence[str]) -> tuple[int, str, bool]:
  """Runs the launcher; returns its status, the last lines, and whether it was elastic.

  Under a reaper: if this process is killed, as kernels of notebooks are, it ends too.
  """
  kept = [*filter(None, [os.environ.get('PYTHONPATH')]), str(_PACKAGE.parent)]
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(kept)}
  lines = output.TaskOutput(b'', _show)
  with launcher_note.Note() as note:
    environment[launcher_note.VARIABLE] = note.path
    running = process.TaskProcess(
      list(words), environment, _GRACE_SECONDS, lines
    )
    interrupt: KeyboardInterrupt | None = None
    try:
      while not running.is_gone:
        try:
          _step(running)
        except KeyboardInterrupt as e:
          # The launcher ends the workers; a second one kills them.
          interrupt = e
          running.send(signal.SIGINT)
    finally:
      running.close()
      lines.close()
    note.newly_trained()
    is_elastic = note.kind == launcher_note.ELASTIC
  if interrupt is not None:
    raise interrupt
  tail = b'\n'.join(lines.tail()).decode('utf-8', 'replace')
  return running.status, tail, is_elastic


def _step(running: process.TaskProcess) -> None:
  reads = {running.channel_fd: running.read_channel}
  if running.output_fd is not None:
    reads[running.output_fd] = running.read_output
  for fd in select.select(list(reads), [], [], _POLL_SECONDS)[0]:
    # Nothing is left of one whose end the other has told.
    if not running.is_gone:
      reads[fd]()


def _show(line: bytes) -> None:
  # Not the descriptor: the stdout of a notebook is an object of Python's.
  sys.stdout.write(line.decode('utf-8', 'replace'))
  sys.stdout.flush()


def _results(directory: pathlib.Path) -> dict[int, Any]:
  """Returns the values or errors of the tasks, by place."""
  results = {}
  # As workers, who run the script under another name, call what it defines.
  sys.modules.setdefault('__mp_main__', sys.modules['__main__'])
  for path in sorted(directory.glob(f'{_RESULT}-??????')):
    place, data = int(path.name.rpartition('-')[2]), path.read_bytes()
    try:
      results[place] = pickle.loads(data) if data else _NOTHING
    except Exception as e:  # Whatever a class of the user's raises.
      results[place] = _UnreadableError(
        f'What rank {place} returned or raised cannot be made again here '
        f'({type(e).__name__}: {e}). Fix: {_SENDABLE}.'
      )
  return results


def main(argv: Sequence[str]) -> None:
  """A worker's part: makes the call that is in a directory, and notes its result."""
  directory = pathlib.Path(argv[1])
  path, script, call = pickle.loads((directory / _CALL).read_bytes())
  sys.path[:] = path
  if script:
    # As multiprocessing does: the script's functions, without its `__main__` block.
    from multiprocessing import spawn

    spawn.prepare(script)
  function, args = pickle.loads(call)
  cluster = ClusterConfig.from_env()
  place: int | None = 0 if cluster is None else cluster.training_index
  has_servers = cluster is not None and 'ps' in cluster.jobs
  if place is not None and not (has_servers and place):
    # Until it returns. A worker beside parameter servers only serves.
    _path(directory, place).write_bytes(b'')
  try:
    result = function(*args)
  except SystemExit as e:
    if e.code:
      raise
    result = None
  except Exception as e:
    with contextlib.suppress(Exception):
      _write(_path(directory, place or 0), e)
    raise
  if place is not None:
    _write(_path(directory, place), result)


def _path(directory: pathlib.Path, place: int) -> pathlib.Path:
  return directory / f'{_RESULT}-{place:06}'


def _write(path: pathlib.Path, result: Any) -> None:
  try:
    data = pickle.dumps(result)
  except Exception as e:
    raise errors.UnsupportedOptionError(
      f'a result of type {type(result).__name__} ({e})',
      'one that can be sent to another process',
      _SENDABLE,
    ) from e
  path.with_suffix('.new').write_bytes(data)
  path.with_suffix('.new').rename(path)


if __name__ == '__main__':
  main(sys.argv)
