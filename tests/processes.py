"""Runs a function in several processes at once, as the workers of a cluster.

Real processes with a deadline: whatever a test does to its workers, none of
them outlives it.

  results = processes.run_workers(train, 2, args=(3,))   # train(rank, 3)
  with processes.Workers(train, 3, args=(3,)) as workers:
    workers.kill(1)
    outcomes = workers.wait()
"""

import dataclasses
import json
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import portpicker

from tests import process_context

DEADLINE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a worker ended.

  Attributes:
    rank: of the worker.
    exitcode: 0, or negative for a signal; None if the deadline ended it.
    value: what the function returned, if it did.
    error: what it raised, if it did and that can be pickled.
    error_text: the traceback of it.
    ended_at: `time.time()` when the function was over.
  """

  rank: int
  exitcode: int | None
  value: Any = None
  error: BaseException | None = None
  error_text: str = ''
  ended_at: float = 0.0


def addresses(count: int) -> list[str]:
  """Free addresses on the loopback interface."""
  return [f'127.0.0.1:{portpicker.pick_unused_port()}' for _ in range(count)]


def tf_config(worker_addresses: Sequence[str], index: int) -> str:
  """TF_CONFIG of one worker."""
  return json.dumps(
    {
      'cluster': {'worker': list(worker_addresses)},
      'task': {'type': 'worker', 'index': index},
    }
  )


class Workers:
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
  ):
    self.addresses = list(ports or addresses(count))
    self._function = function
    self._args = tuple(args)
    self._env = {'TFS_SECRET': 'a secret of this test', **(env or {})}
    self._is_fresh = is_fresh
    self._ends_at = time.monotonic() + deadline
    self._directory = tempfile.TemporaryDirectory()
    self._processes = {}
    for rank in range(count):
      self.start(rank)

  def start(self, rank: int) -> None:
    """Starts a worker, or starts it again after its end."""
    env = {**self._env, 'TF_CONFIG': tf_config(self.addresses, rank)}
    process = process_context.process(
      _main,
      (self._function, rank, self._args, self._path(rank)),
      env,
      self._is_fresh,
    )
    process.start()
    self._processes[rank] = process

  def pid(self, rank: int) -> int:
    """The process id of a worker."""
    return self._processes[rank].pid

  def signal(self, rank: int, number: int) -> None:
    """Sends a worker a signal."""
    os.kill(self.pid(rank), number)

  def kill(self, rank: int) -> None:
    """Ends a worker as `kill -9` does, and waits until it is gone."""
    # One that a signal has ended already is no error.
    self._processes[rank].kill()
    self._processes[rank].join(10)

  def is_alive(self, rank: int) -> bool:
    """Whether a worker still runs."""
    return self._processes[rank].is_alive()

  def wait(self, ranks: Sequence[int] | None = None) -> list[Outcome]:
    """Waits for workers, until the deadline at most; outcomes by rank."""
    ranks = sorted(self._processes) if ranks is None else ranks
    for rank in ranks:
      self._processes[rank].join(max(0.0, self._ends_at - time.monotonic()))
    return [self._outcome(rank) for rank in ranks]

  def close(self) -> None:
    """Ends every worker that still runs."""
    for process in self._processes.values():
      if process.is_alive():
        process.kill()
      process.join(10)
    self._directory.cleanup()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def _path(self, rank):
    return os.path.join(self._directory.name, f'{rank}.pickle')

  def _outcome(self, rank):
    exitcode = self._processes[rank].exitcode
    if not os.path.exists(self._path(rank)):
      return Outcome(rank, exitcode)
    with open(self._path(rank), 'rb') as f:
      return Outcome(rank, exitcode, **pickle.load(f))


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
  for outcome in outcomes:
    if outcome.exitcode is None:
      raise AssertionError(f'worker {outcome.rank} ran into the deadline')
  for outcome in outcomes:
    if outcome.error_text:
      raise AssertionError(f'worker {outcome.rank}: {outcome.error_text}')
    if outcome.exitcode:
      raise AssertionError(
        f'worker {outcome.rank} ended with status {outcome.exitcode}'
      )
  return [outcome.value for outcome in outcomes]


def _main(function, rank, args, path):
  """What a worker process does."""
  result = {}
  try:
    result['value'] = function(rank, *args)
  except BaseException as e:  # Also SystemExit: the test is to see it.
    result['error_text'] = traceback.format_exc()
    result['error'] = _picklable(e)
  result['ended_at'] = time.time()
  temporary = f'{path}.{os.getpid()}'
  with open(temporary, 'wb') as f:
    pickle.dump(result, f)
  os.replace(temporary, path)


def _picklable(error):
  try:
    return pickle.loads(pickle.dumps(error))
  except Exception:
    return None
