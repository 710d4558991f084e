"""Runs functions in processes: the workers of a cluster, or a single task.

The processes are real and have a deadline, so no worker outlives its test.
`benchmarks/processes.py` starts programs. This file does not import it, because
some workers run without TensorFlow.

  results = processes.run_workers(train, 2, args=(3,))   # train(rank, 3)
  with processes.Workers(train, 3, args=(3,)) as workers:
    workers.kill(1)
    outcomes = workers.wait()

A process starts as a copy of a process that has imported TensorFlow, because the
import takes four CPU seconds. The copy is made before TensorFlow runs any operation.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from multiprocessing import forkserver
from typing import Any
from unittest import mock

from tf_strategies.launch import ports as ports_lib

DEADLINE_SECONDS = 120.0
# `make soak` runs for hours on machines that may stall, so it extends all
# deadlines.
DEADLINE_FACTOR = float(os.environ.get('TFS_DEADLINE_FACTOR', '1'))

# Whether workers differ in ways that must not matter; see `Workers`.
ARE_UNLIKE = os.environ.get('TFS_UNLIKE_WORKERS') == '1'
_GARBAGE = 'TFS_GARBAGE'

# TensorFlow reads this variable during import. Its C++ code then logs only errors.
_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '2'}
_PRELOADED = ['numpy', 'tensorflow', 'keras']


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a process ended.

  Attributes:
    rank: rank of the worker, or name of the task.
    exitcode: 0, or negative for a signal; None if the deadline ended it.
    value: result of the function, if it returned.
    error: exception that the function raised, if it can be pickled.
    error_text: traceback of the exception.
    ended_at: `time.time()` when the function ended.
  """

  rank: Any
  exitcode: int | None
  value: Any = None
  error: BaseException | None = None
  error_text: str = ''
  ended_at: float = 0.0

  def result(self) -> Any:
    """Returns the result of the function.

    Raises:
      AssertionError: if the function raised, or the process died or ran into the
        deadline.
    """
    if self.exitcode is None:
      raise AssertionError(f'worker {self.rank} exceeded the deadline')
    if self.error_text:
      raise AssertionError(f'worker {self.rank}: {self.error_text}')
    if self.exitcode:
      raise AssertionError(
        f'worker {self.rank} ended with status {self.exitcode}'
      )
    return self.value


def addresses(count: int) -> list[str]:
  """Returns free addresses on the loopback interface."""
  return [f'127.0.0.1:{port}' for port in ports_lib.pick_ports(count)]


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
  """Waits until a condition holds.

  Raises:
    AssertionError: if it does not hold within some seconds.
  """
  ends_at = time.monotonic() + seconds * DEADLINE_FACTOR
  while not condition():
    assert time.monotonic() < ends_at, 'too late'
    time.sleep(0.01)


def tf_config(
  cluster: Mapping[str, Sequence[str]], index: int, task_type: str = 'worker'
) -> str:
  """Returns the TF_CONFIG of one task."""
  jobs = {job: list(tasks) for job, tasks in cluster.items()}
  return json.dumps(
    {'cluster': jobs, 'task': {'type': task_type, 'index': index}}
  )


class ProcessGroup:
  """Processes that call functions. They are ended when the context exits.

  They also end when this process is killed.

  Args:
    deadline: seconds after which `wait` gives up; multiplied by DEADLINE_FACTOR.
  """

  def __init__(self, deadline: float = DEADLINE_SECONDS):
    self._deadline = deadline * DEADLINE_FACTOR
    self._ends_at = time.monotonic() + self._deadline
    self._directory = tempfile.TemporaryDirectory()
    self._processes: dict[Hashable, multiprocessing.Process] = {}

  def start_function(
    self,
    key: Hashable,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    is_fresh: bool = False,
    exits_at_once: bool = False,
  ) -> None:
    """Starts a process, or restarts it after its end.

    Args:
      key: name of the process, such as its rank.
      function: function of a module, called as `function(*args)`.
      args: arguments, which are pickled.
      env: additional environment variables.
      is_fresh: whether to start a new interpreter instead of a copy.
      exits_at_once: whether to exit without waiting for threads. TensorFlow's threads
        may wait for servers that are gone.
    """
    with contextlib.suppress(FileNotFoundError):
      os.remove(self._path(key))
    context = multiprocessing.get_context('spawn' if is_fresh else 'forkserver')
    if not is_fresh:
      context.set_forkserver_preload(_PRELOADED)
      with mock.patch.dict(os.environ, _ENVIRONMENT):
        forkserver.ensure_running()
    process = context.Process(
      target=_main,
      args=(
        function,
        tuple(args),
        {**os.environ, **(env or {})},
        self._path(key),
        exits_at_once,
      ),
      daemon=True,
    )
    # A new interpreter reads some variables when it starts.
    with mock.patch.dict(os.environ, (env or {}) if is_fresh else {}):
      process.start()
    self._processes[key] = process

  def pid(self, *key: Hashable) -> int:
    """Returns the id of a process."""
    return self._process(key).pid

  def is_alive(self, *key: Hashable) -> bool:
    """Returns whether a process still runs."""
    return self._process(key).is_alive()

  def kill(self, *key: Hashable) -> None:
    """Kills a process as `kill -9` does, and waits until it is gone."""
    # A process that a signal has already ended is not an error.
    self._process(key).kill()
    self._process(key).join(10)

  def signal(self, *key_and_number: Hashable) -> None:
    """Sends a signal to a process.

    The arguments are its key, then the signal number.
    """
    os.kill(self.pid(*key_and_number[:-1]), key_and_number[-1])

  def wait_for(self, keys: Iterable[Hashable]) -> list[Outcome]:
    """Waits for processes until the deadline, and returns their outcomes."""
    keys = list(keys)
    for key in keys:
      self._processes[key].join(max(0.0, self._ends_at - time.monotonic()))
    late = [key for key in keys if self._processes[key].is_alive()]
    outcomes = [self._outcome(key) for key in keys]
    for key in late:
      # Prints the stacks to the test's log, to show where the process hangs.
      os.kill(self._processes[key].pid, signal.SIGABRT)
      self._processes[key].join(10)
    return outcomes

  def close(self) -> None:
    """Ends every process that still runs."""
    for process in self._processes.values():
      if process.is_alive():
        process.kill()
      process.join(10)
    self._directory.cleanup()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _process(self, key):
    return self._processes[key[0] if len(key) == 1 else key]

  def _path(self, key):
    return os.path.join(self._directory.name, f'{key}.pickle')

  def _outcome(self, key):
    exitcode = self._processes[key].exitcode
    if not os.path.exists(self._path(key)):
      return Outcome(key, exitcode, ended_at=time.time())
    with open(self._path(key), 'rb') as f:
      return Outcome(key, exitcode, **pickle.load(f))


class Workers(ProcessGroup):
  """Processes that run one function, each with its rank as first argument.

  Each gets TF_CONFIG and TFS_SECRET, as from a launcher.

  Args:
    function: function of a module, called as `function(rank, *args)`.
    count: number of workers.
    args: further arguments, which are pickled.
    env: environment variables of every worker.
    deadline: seconds after which `wait` ends processes that still run.
    ports: addresses to use; free ones by default.
    is_fresh: whether each starts as a new interpreter, instead of a copy of one
      that has imported TensorFlow.
    are_unlike: whether workers differ on purpose in ways that must not change their
      collectives. Every other worker never frees garbage, and the others free it
      at once. Each has its own hash seed. Set by TFS_UNLIKE_WORKERS=1 by default.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    count: int,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE_SECONDS,
    ports: Sequence[str] | None = None,
    is_fresh: bool = False,
    are_unlike: bool = ARE_UNLIKE,
  ):
    super().__init__(deadline)
    self.addresses = list(ports or addresses(count))
    self._function = function
    self._args = tuple(args)
    self._env = {'TFS_SECRET': 'a secret of this test', **(env or {})}
    self._is_fresh = is_fresh or are_unlike
    self._are_unlike = are_unlike
    for rank in range(count):
      self.start(rank)

  def start(self, rank: int) -> None:
    """Starts a worker, or restarts it after its end."""
    env = {'TF_CONFIG': tf_config({'worker': self.addresses}, rank)}
    if self._are_unlike:
      env[_GARBAGE] = ('kept', 'freed')[rank % 2]
      env['PYTHONHASHSEED'] = str(rank + 1)
    self.start_function(
      rank,
      self._function,
      (rank, *self._args),
      {**self._env, **env},
      self._is_fresh,
    )

  def wait(self, ranks: Sequence[int] | None = None) -> list[Outcome]:
    """Waits for workers until the deadline, and returns their outcomes by rank."""
    return self.wait_for(sorted(self._processes) if ranks is None else ranks)


def run_workers(
  function: Callable[..., Any], count: int, **options
) -> list[Any]:
  """Runs `function(rank, *args)` in `count` processes and returns their results.

  Args:
    function: function of a module.
    count: number of processes.
    **options: options of `Workers`.

  Raises:
    AssertionError: if a worker raised, died, or exceeded the deadline.
  """
  with Workers(function, count, **options) as workers:
    outcomes = workers.wait()
  # Reports the deadline first, because other workers may fail due to one that
  # hangs.
  outcomes.sort(key=lambda outcome: outcome.exitcode is not None)
  values = {outcome.rank: outcome.result() for outcome in outcomes}
  return [values[rank] for rank in range(count)]


def _main(function, args, env, path, exits_at_once):
  """Runs the function in the new process and stores its result."""
  threading.Thread(
    target=_end_with_parent, name='end_with_parent', daemon=True
  ).start()
  # A copy has the environment of the moment when the server was started.
  os.environ.clear()
  os.environ.update(env)
  import numpy as np

  # Without a new seed, all copies would draw the same numbers.
  np.random.seed()
  faulthandler.enable()
  _set_garbage(env.get(_GARBAGE))
  result = {}
  try:
    result['value'] = function(*args)
  except BaseException as e:  # Also SystemExit, which the test must see.
    result['error_text'] = traceback.format_exc()
    result['error'] = _picklable(e)
  result['ended_at'] = time.time()
  temporary = f'{path}.{os.getpid()}'
  with open(temporary, 'wb') as f:
    pickle.dump(result, f)
  os.replace(temporary, path)
  if exits_at_once:
    os._exit(0)


def _set_garbage(garbage):
  """Keeps unreferenced objects, or frees them at once; see `Workers`."""
  if garbage == 'kept':
    gc.disable()
    # Keras calls it in `clear_session`.
    gc.collect = lambda generation=2: 0
  elif garbage == 'freed':
    gc.freeze()  # Otherwise each collection scans all of TensorFlow.
    gc.set_threshold(100, 2, 2)


def _end_with_parent():
  """Ends this process when its parent has ended."""
  # The function may never return: a collective may wait for dead workers.
  multiprocessing.parent_process().join()
  os._exit(1)


def _picklable(error):
  try:
    return pickle.loads(pickle.dumps(error))
  except Exception:
    return None
