"""Runs functions in processes: the workers of a cluster, or a single task.

Real processes with a deadline: whatever a test does to its workers, none of
them outlives it. Programs are started with `benchmarks/processes.py`, which this
file does not import: some workers do without TensorFlow.

  results = processes.run_workers(train, 2, args=(3,))   # train(rank, 3)
  with processes.Workers(train, 3, args=(3,)) as workers:
    workers.kill(1)
    outcomes = workers.wait()

A process begins as a copy of one that has imported TensorFlow: the import takes
four seconds of a CPU. The copy is made before anything of TensorFlow runs.
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
# `make soak` gives everything longer: it runs for hours, on machines that stall.
DEADLINE_FACTOR = float(os.environ.get('TFS_DEADLINE_FACTOR', '1'))

# Whether workers differ in what their program does not say; see `Workers`.
ARE_UNLIKE = os.environ.get('TFS_UNLIKE_WORKERS') == '1'
_GARBAGE = 'TFS_GARBAGE'

# Read when TensorFlow is imported: errors only, of C++.
_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '2'}
_PRELOADED = ['numpy', 'tensorflow', 'keras']


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a process ended.

  Attributes:
    rank: of the worker, or the name of the task.
    exitcode: 0, or negative for a signal; None if the deadline ended it.
    value: what the function returned, if it did.
    error: what it raised, if it did and that can be pickled.
    error_text: the traceback of it.
    ended_at: `time.time()` when the function was over.
  """

  rank: Any
  exitcode: int | None
  value: Any = None
  error: BaseException | None = None
  error_text: str = ''
  ended_at: float = 0.0

  def result(self) -> Any:
    """What the function returned.

    Raises:
      AssertionError: it raised, died, or ran into the deadline.
    """
    if self.exitcode is None:
      raise AssertionError(f'worker {self.rank} ran into the deadline')
    if self.error_text:
      raise AssertionError(f'worker {self.rank}: {self.error_text}')
    if self.exitcode:
      raise AssertionError(
        f'worker {self.rank} ended with status {self.exitcode}'
      )
    return self.value


def addresses(count: int) -> list[str]:
  """Free addresses on the loopback interface."""
  return [f'127.0.0.1:{port}' for port in ports_lib.pick_ports(count)]


def tf_config(
  cluster: Mapping[str, Sequence[str]], index: int, task_type: str = 'worker'
) -> str:
  """TF_CONFIG of one task."""
  jobs = {job: list(tasks) for job, tasks in cluster.items()}
  return json.dumps(
    {'cluster': jobs, 'task': {'type': task_type, 'index': index}}
  )


class ProcessGroup:
  """Processes that call functions; a context that ends those that still run.

  They also end when this process is killed.

  Args:
    deadline: seconds, times DEADLINE_FACTOR, after which `wait` gives up on what
      still runs.
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
    """Starts a process, or starts it again after its end.

    Args:
      key: a name of it, such as its rank.
      function: a module's function, called as `function(*args)`.
      args: pickled.
      env: variables to set beside this process's.
      is_fresh: whether it is a new interpreter instead of a copy.
      exits_at_once: whether it ends without waiting for its threads, such as
        TensorFlow's, which may wait for servers that are gone.
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
    # A new interpreter reads some of them when it starts.
    with mock.patch.dict(os.environ, (env or {}) if is_fresh else {}):
      process.start()
    self._processes[key] = process

  def pid(self, *key: Hashable) -> int:
    """The id of a process."""
    return self._process(key).pid

  def is_alive(self, *key: Hashable) -> bool:
    """Whether a process still runs."""
    return self._process(key).is_alive()

  def kill(self, *key: Hashable) -> None:
    """Ends a process as `kill -9` does, and waits until it is gone."""
    # One that a signal has ended already is no error.
    self._process(key).kill()
    self._process(key).join(10)

  def signal(self, *key_and_number: Hashable) -> None:
    """Sends a process a signal: its key, then the number."""
    os.kill(self.pid(*key_and_number[:-1]), key_and_number[-1])

  def wait_for(self, keys: Iterable[Hashable]) -> list[Outcome]:
    """Waits for processes, until the deadline at most; their outcomes."""
    keys = list(keys)
    for key in keys:
      self._processes[key].join(max(0.0, self._ends_at - time.monotonic()))
    late = [key for key in keys if self._processes[key].is_alive()]
    outcomes = [self._outcome(key) for key in keys]
    for key in late:
      # Its stacks, in the test's log, say where it hangs.
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

  TF_CONFIG and TFS_SECRET are set in each, as a launcher does.

  Args:
    function: a module's function, called as `function(rank, *args)`.
    count: how many.
    args: further arguments; pickled.
    env: environment variables of every worker.
    deadline: seconds after which `wait` ends what still runs.
    ports: addresses to use; free ones by default.
    is_fresh: whether each begins as a new interpreter, instead of as a copy of
      one that has imported TensorFlow.
    are_unlike: whether workers differ on purpose in what must not decide which
      collectives run: every other one frees no garbage, and the others free it at
      once; each has its own hash seed. By default as TFS_UNLIKE_WORKERS=1 says.
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
    """Starts a worker, or starts it again after its end."""
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
    """Waits for workers, until the deadline at most; outcomes by rank."""
    return self.wait_for(sorted(self._processes) if ranks is None else ranks)


def run_workers(
  function: Callable[..., Any], count: int, **options
) -> list[Any]:
  """Runs `function(rank, *args)` in `count` processes; what each returned.

  Args:
    function: a module's function.
    count: how many.
    **options: of `Workers`.

  Raises:
    AssertionError: a worker raised, died, or ran into the deadline.
  """
  with Workers(function, count, **options) as workers:
    outcomes = workers.wait()
  # The deadline first: the others may have failed because of who hangs.
  outcomes.sort(key=lambda outcome: outcome.exitcode is not None)
  values = {outcome.rank: outcome.result() for outcome in outcomes}
  return [values[rank] for rank in range(count)]


def _main(function, args, env, path, exits_at_once):
  """What a process does."""
  threading.Thread(
    target=_end_with_parent, name='end_with_parent', daemon=True
  ).start()
  # The server has that of the moment when it was started.
  os.environ.clear()
  os.environ.update(env)
  import numpy as np

  # All copies would draw the same numbers.
  np.random.seed()
  faulthandler.enable()
  _set_garbage(env.get(_GARBAGE))
  result = {}
  try:
    result['value'] = function(*args)
  except BaseException as e:  # Also SystemExit: the test is to see it.
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
  """Keeps what nobody refers to, or frees it at once; see `Workers`."""
  if garbage == 'kept':
    gc.disable()
    # Keras calls it in `clear_session`.
    gc.collect = lambda generation=2: 0
  elif garbage == 'freed':
    gc.freeze()  # Otherwise each collection looks at all of TensorFlow.
    gc.set_threshold(100, 2, 2)


def _end_with_parent():
  """Ends this process when the one that started it is gone."""
  # What it does may never end: a collective whose other workers are dead.
  multiprocessing.parent_process().join()
  os._exit(1)


def _picklable(error):
  try:
    return pickle.loads(pickle.dumps(error))
  except Exception:
    return None
