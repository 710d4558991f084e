"""`tfs.launch(function)`: a function on several workers, from a notebook or script.

Each worker is a process that `tfs launch` starts. The function travels as bytes in a
file, and so do results.
"""

import collections
import contextlib
import importlib.util
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from typing import Any

from tf_strategies import errors, option_checks
from tf_strategies.cluster import ClusterConfig, command_line
from tf_strategies.cluster import job as job_lib
from tf_strategies.launch import output

_CALL = 'call'
_SENDABLE = 'return numbers, NumPy arrays or a path'
# The launcher's status for a wrong command line; it then writes its usage last.
_REFUSED, _USAGE = 2, 'Usage: '


def launch(
  function: Callable[..., Any],
  args: tuple[Any, ...] | list[Any] = (),
  *,
  num_workers: int = 2,
  num_ps: int = 0,
  chief: bool = False,
  evaluator: bool = False,
  max_restarts: int = 0,
  log_dir: str | os.PathLike[str] | None = None,
  rank_filter: str | None = None,
  grace_period: float = 10.0,
) -> list[Any]:
  """Calls a function on each worker of a new job, and returns what each returned.

  The workers are processes of their own, without what this one has loaded, so it
  does not matter whether TensorFlow was used here. Their output appears here, with
  `[worker 0]` before each line.

  A function of a module travels by name, so workers import that module. One of a
  notebook, and one inside of another function, is sent whole, by cloudpickle: `pip
  install '.[notebook]'`. A script that calls this must do so under
  `if __name__ == '__main__':`, since workers run the script for its functions.

  Args:
    function: a function whose strategy finds the other workers by TF_CONFIG.
    args: its arguments, for all workers alike.
    num_workers: number of workers. This and the further arguments are the flags of
      `tfs launch`.
    num_ps: number of parameter servers.
    chief: whether there is a chief.
    evaluator: whether there is an evaluator.
    max_restarts: how often a task that fails is started again.
    log_dir: directory for the output of each task.
    rank_filter: tasks whose lines appear here, such as 'worker:0'.
    grace_period: seconds between SIGTERM and SIGKILL.

  Returns:
    The results of chief and workers, in this order. Workers that serve a chief
    beside parameter servers return nothing. The result is None of a worker that an
    elastic job lost, or that ended its process by `os._exit(0)`.

  Raises:
    UnsupportedOptionError: an unknown flag or a wrong value of one, no function,
      or one that cannot be sent.
    WorkerUnavailableError: a worker failed or was killed; caused by what the function
      raised there, if it raised.

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
  if log_dir is not None:
    option_checks.check_path(
      'log_dir', log_dir, "write log_dir='logs', or None"
    )
  counts = job_lib.TaskCounts(num_workers, num_ps, chief, evaluator)
  flags = {**vars(counts), 'max_restarts': max_restarts}
  flags['grace_period'] = grace_period
  optional = {'log_dir': log_dir, 'rank_filter': rank_filter}
  flags |= {name: v for name, v in optional.items() if v is not None}
  with tempfile.TemporaryDirectory(prefix='tfs-launch-') as name:
    return _call(function, tuple(args), counts, flags, pathlib.Path(name))


def _call(
  function: Callable[..., Any],
  args: tuple[Any, ...],
  counts: job_lib.TaskCounts,
  flags: Mapping[str, Any],
  directory: pathlib.Path,
) -> list[Any]:
  """Runs a job with these flags; returns the results of its workers."""
  (directory / _CALL).write_bytes(_packed(function, args))
  python = [sys.executable, '-u', '-m']
  words = [f'--{name}={value}' for name, value in flags.items()]
  runner = ['tf_strategies.launch.functions', str(directory)]
  launcher = [*python, 'tf_strategies', 'launch', *words]
  command = [*launcher, '--', *python, *runner]
  status, tail = _run(command)
  if status == _REFUSED and tail.rpartition('\n')[2].startswith(_USAGE):
    # The lines of tasks begin with their names: it is the launcher that ends so.
    _, _, refusal = tail.rpartition('tfs launch: ')
    raise errors.UnsupportedOptionError(refusal.partition(f'\n{_USAGE}')[0])
  if status:
    raised = sorted(directory.glob('*.error'))
    raise errors.WorkerUnavailableError(
      f'The job of {function!r} ended with {output.ending(status)}. It wrote '
      f'last:\n{tail}'
    ) from (_error(raised[0]) if raised else None)
  # Workers beside parameter servers only serve.
  count = sum(counts.all_counts[name] for name in counts.training_types)
  paths = [directory / f'{place}.result' for place in range(count)]
  return [_read(path) if path.exists() else None for path in paths]


def _packed(function, args) -> bytes:
  """Returns the call as bytes, for a worker."""
  name = getattr(function, '__qualname__', '')
  module = getattr(function, '__module__', None) or ''
  home = sys.modules.get(module)
  is_of_main = home is sys.modules['__main__']
  if module == '__mp_main__' and not is_of_main:
    raise errors.UnsupportedOptionError(
      f'a launch of {name} while a worker reads the script for its functions',
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
        'a function of a module, or an environment with cloudpickle',
        "in the checkout run: pip install '.[notebook]', or put it into a module",
      )
    import cloudpickle as pack
  try:
    call = pack.dumps((function, args))
  # Whatever an argument's own code raises.
  except Exception as e:
    raise errors.UnsupportedOptionError(
      f'{name or function!r} ({type(e).__name__}: {e})',
      'a function and arguments that can be sent to another process',
      'make inside the function what cannot be sent, such as models, data '
      'sets and strategies',
    ) from e
  script = main if is_of_main and is_named else {}
  return pickle.dumps(({'sys_path': sys.path, **script}, call))


def _main_script() -> dict[str, str]:
  """Returns what `spawn.prepare` needs to find this program's own functions."""
  main = sys.modules['__main__']
  name = getattr(getattr(main, '__spec__', None), 'name', None)
  if name and not name.endswith('__main__'):  # By `python -m`.
    return {'init_main_from_name': name}
  path = getattr(main, '__file__', None)
  if path is None or not os.path.isfile(path):  # A notebook, or stdin.
    return {}
  return {'init_main_from_path': path}


def _run(words: Sequence[str]) -> tuple[int, str]:
  """Returns the launcher's status and its last lines.

  It ends when nobody reads its output any more.
  """
  tail: collections.deque[str] = collections.deque(maxlen=output.TAIL_LINES)
  interrupt: KeyboardInterrupt | None = None
  # In a session of its own: Ctrl-C reaches it through this process only.
  with subprocess.Popen(
    words,
    env=command_line.module_environment(),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,
  ) as launcher:
    while True:
      try:
        for line in launcher.stdout:
          text = line.decode('utf-8', 'replace')
          # Not the descriptor: the stdout of a notebook is an object of Python's.
          sys.stdout.write(_writable(text))
          sys.stdout.flush()
          tail.append(text.rstrip('\n'))
        break
      except KeyboardInterrupt as e:
        # The launcher ends the workers; a second one kills them.
        interrupt = e
        launcher.send_signal(signal.SIGINT)
  if interrupt is not None:
    raise interrupt
  return launcher.returncode, '\n'.join(tail)


def _writable(text: str) -> str:
  """Returns a text without the characters that stdout does not take."""
  coding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
  return text.encode(coding, 'replace').decode(coding)


def _read(path: pathlib.Path) -> Any:
  """Returns what a worker returned or raised."""
  # Workers run the script under this name, and so call the classes in it.
  sys.modules.setdefault('__mp_main__', sys.modules['__main__'])
  try:
    return pickle.loads(path.read_bytes())
  except Exception as e:  # Whatever a class of the user's raises.
    raise errors.WorkerUnavailableError(
      f'What rank {path.stem} returned or raised cannot be made again here '
      f'({type(e).__name__}: {e}). Fix: {_SENDABLE}.'
    ) from None


def _error(path: pathlib.Path) -> BaseException:
  try:
    return _read(path)
  except errors.WorkerUnavailableError as e:
    return e


def main(argv: Sequence[str]) -> None:
  """Makes, on a worker, the call that is in a directory, and notes its result."""
  directory = pathlib.Path(argv[1])
  setup, call = pickle.loads((directory / _CALL).read_bytes())
  # Reads the script for its functions, without its `__main__` block.
  spawn.prepare(setup)
  function, args = pickle.loads(call)
  cluster = ClusterConfig.from_env()
  place: int | None = 0 if cluster is None else cluster.training_index
  try:
    result = function(*args)
  except SystemExit as e:
    if e.code:
      raise
    result = None
  except Exception as e:
    with contextlib.suppress(Exception):
      _write(directory / f'{place or 0}.error', e)
    raise
  if place is not None:
    _write(directory / f'{place}.result', result)


def _write(path: pathlib.Path, value: Any) -> None:
  try:
    data = pickle.dumps(value)
  except Exception as e:
    raise errors.UnsupportedOptionError(
      f'one of type {type(value).__name__} ({e})',
      'a result that can be sent to another process',
      _SENDABLE,
    ) from e
  unfinished = path.with_suffix('.new')
  unfinished.write_bytes(data)
  unfinished.rename(path)


if __name__ == '__main__':
  main(sys.argv)
