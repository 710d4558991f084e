"""Runs a process's part of a job: it trains, evaluates or serves variables."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from absl import logging

from tf_strategies import option_checks
from tf_strategies.cluster import checks, config, exit_codes, reachability

_Result = TypeVar('_Result')

# The tasks that the chief sends its work to.
_SERVER_JOBS = ('ps', 'worker')
_SIGNAL_POLL_SECONDS = 0.2
# Less than the 30 seconds that Kubernetes gives a pod.
_STAY_SECONDS = 20.0
# A chief that is starved of CPU may miss one probe, but hardly three.
_PROBES_TILL_GONE = 3


def run_task(
  train: Callable[[], _Result],
  evaluate: Callable[[], Any] | None = None,
  cluster: config.ClusterConfig | None = None,
  deadline_seconds: float = 300.0,
) -> _Result | Any:
  """Runs this process's part of a job; every task runs the same program.

  In a job with parameter servers only the chief trains: `ps` and `worker` start
  a TensorFlow server and run what the chief sends them, until SIGTERM or SIGINT
  ends the process with status 143. After SIGTERM they stay for a chief that may want to save, until it has gone, for 20
  seconds at most; a second signal ends them at once. In every other job each
  chief and worker trains, and its strategy finds the others.

  An evaluator gets SIGTERM right after the last checkpoint was written. It goes
  on for 20 seconds at most and ends when `evaluate` returns; cut short, it ends
  with status 143. A handler of SIGTERM that the program has set comes first.

  Call it before anything else that starts TensorFlow's runtime, and in the main
  thread, where signals arrive.

  Args:
    train: called without arguments where this task trains.
    evaluate: called without arguments on an evaluator, at once.
    cluster: the tasks; None reads `ClusterConfig.from_env`, and without a
      cluster this process trains alone.
    deadline_seconds: how long the chief waits for the servers.

  Returns:
    What `train` or `evaluate` returned; None on an evaluator without
    `evaluate`. Does not return on a server.

  Raises:
    ClusterConfigError: the description of the cluster is malformed, there are
      parameter servers but no chief.
    RendezvousError: servers are missing at the deadline; or this server cannot
      listen at its address.
    UnsupportedOptionError: an argument of another kind.

  Example:

    >>> from tf_strategies import cluster
    >>> cluster.run_task(train=lambda: 'trained')
    'trained'
  """
  option_checks.check_function(
    'train', train, 'pass the function itself: tfs.cluster.run_task(train)'
  )
  option_checks.check_function('evaluate', evaluate, or_none=True)
  option_checks.check_seconds('deadline_seconds', deadline_seconds)
  cluster = config.given_or_from_env(cluster)
  if cluster is None:
    return train()
  has_servers = 'ps' in cluster.jobs
  if has_servers and 'chief' not in cluster.jobs:
    raise checks.bad(
      'cluster',
      sorted(cluster.jobs),
      'ps together with a chief, which trains with them',
      'add "chief": ["host:2222"], and start this program there with "task": '
      '{"type": "chief", "index": 0}; or leave ps out',
    )
  if cluster.task_type == 'evaluator':
    return _evaluate(evaluate)
  if not has_servers:
    return train()
  # A call to a dead task then fails at once; otherwise gRPC may keep it until the
  # task is back. TensorFlow reads it when its gRPC starts.
  os.environ.setdefault('GRPC_FAIL_FAST', 'use_caller')
  if cluster.task_type in _SERVER_JOBS:
    return _serve(cluster)
  servers = {
    f'{job} {index}': address
    for job in _SERVER_JOBS
    for index, address in enumerate(cluster.jobs.get(job, ()))
  }
  reachability.wait_for_tasks(servers, deadline_seconds, 'to begin training')
  return train()


def _evaluate(evaluate: Callable[[], Any] | None) -> Any:
  """Runs the evaluator's part; a SIGTERM leaves it time for the last checkpoint."""
  if evaluate is None:
    logging.warning('This evaluator has nothing to do: evaluate is None.')
    return None
  is_main = threading.current_thread() is threading.main_thread()
  if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
    # Signals do not arrive here, or the program has other plans for them.
    return evaluate()
  stay = _Stay()
  try:
    return evaluate()
  finally:
    stay.end()


class _Stay:
  """Lets this process go on for a while after SIGTERM; a second signal ends it.

  Args:
    is_over: returns whether nobody needs this process any more.
  """

  def __init__(self, is_over: Callable[[], bool] = lambda: False):
    self._is_over = is_over
    # A thread: it ends the process while the main thread is in C++, too.
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._has_ended = False
    signal.signal(signal.SIGTERM, self._on_signal)

  def _on_signal(self, *_) -> None:
    if self._thread.ident is not None:
      _leave()
    self._thread.start()

  def _watch(self) -> None:
    leaves_at = time.monotonic() + _STAY_SECONDS
    while time.monotonic() < leaves_at and not self._is_over():
      time.sleep(_SIGNAL_POLL_SECONDS)
    if not self._has_ended:
      _leave()

  def end(self) -> None:
    """Gives SIGTERM its usual meaning again."""
    self._has_ended = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _serve(cluster: config.ClusterConfig) -> NoReturn:
  """Runs a TensorFlow server at this task's address until a signal comes."""
  chief = {'chief 0': cluster.jobs['chief'][0]}

  def has_chief_gone() -> bool:
    probes = (reachability.unreachable(chief) for _ in range(_PROBES_TILL_GONE))
    return all(probes)  # Until one is answered.

  # TensorFlow takes seconds to load, and a signal may come meanwhile.
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, lambda *_: _leave())
    _Stay(has_chief_gone)
  import tensorflow as tf

  task = f'{cluster.task_type} {cluster.task_index}'
  jobs = {j: list(t) for j, t in cluster.jobs.items() if j != 'evaluator'}
  with reachability.serving(task, cluster.address):
    # No config: TensorFlow says how many inter-op threads there are.
    server = tf.distribute.Server(
      tf.train.ClusterSpec(jobs),
      job_name=cluster.task_type,
      task_index=cluster.task_index,
      protocol='grpc',
    )
  logging.info('%s serves at %s.', task, server.target)
  # Not `server.join()`: while the main thread is in C++, Python sees no signal. A
  # signal that comes just before a wait begins does not interrupt it, and Python calls
  # the handler after it: hence many short waits.
  while True:
    time.sleep(_SIGNAL_POLL_SECONDS)


def _leave() -> NoReturn:
  """Ends the process at once, whatever it is doing, with SIGTERM's status.

  TensorFlow cannot stop a server, and an interpreter that is taken down while
  the server's threads run may crash or wait for them.
  """
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(Exception):
      stream.flush()
  os._exit(exit_codes.RESTARTABLE_EXIT_CODE)
