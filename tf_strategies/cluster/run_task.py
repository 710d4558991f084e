"""Runs a process's part of a job: it trains, evaluates or serves variables."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
  ends the process with status 0, or that of TFS_TERMINATED_EXIT_CODE. After
  SIGTERM they stay for a chief that may want to save, until it has gone, for 20
  seconds at most; a second signal ends them at once. In every other job each
  chief and worker trains, and its strategy finds the others.

  An evaluator gets SIGTERM right after the last checkpoint was written. It goes
  on for 20 seconds at most and ends when `evaluate` returns; cut short, it ends
  with status 143. A handler of SIGTERM that the program has set comes first.

  Call it before anything else that starts TensorFlow's runtime, and in the main
  thread, where signals arrive.

  A TFJob lists the evaluator in TF_CONFIG. `tf.distribute.ParameterServerStrategy`
  waits for all that its resolver lists: in `train`, give it one without.

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
    ClusterConfigError: the description of the cluster is malformed, or there
      are parameter servers but no chief.
    RendezvousError: servers are missing at the deadline; or this server cannot
      listen at its address.
    UnsupportedOptionError: an argument of another kind, or
      TFS_TERMINATED_EXIT_CODE is no exit status.

  Example:

    >>> from tf_strategies import cluster
    >>> cluster.run_task(train=lambda: 'trained')
    'trained'
    >>> jobs = {'chief': {0: 'a:1'}, 'worker': {0: 'b:1'}, 'ps': {0: 'c:1'}}
    >>> evaluator = cluster.ClusterConfig(jobs, 'evaluator', 0)
    >>> cluster.run_task(train=lambda: 'trained', evaluate=lambda: 'evaluated',
    ...                  cluster=evaluator)
    'evaluated'
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
  # A sparse description lists what its task needs to know, and a server need
  # not know the chief.
  if has_servers and 'chief' not in cluster.jobs and not cluster.is_sparse:
    raise checks.bad(
      'cluster',
      sorted(cluster.jobs),
      'ps together with a chief, which trains with them',
      'add "chief": ["host:2222"], and start this program there with "task": '
      '{"type": "chief", "index": 0}; or leave ps out',
    )
  if cluster.task_type == 'evaluator':
    if evaluate is None:
      logging.warning('This evaluator has nothing to do: evaluate is None.')
      return None
    with _staying():
      return evaluate()
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
    for index, address in cluster.jobs.get(job, {}).items()
  }
  reachability.wait_for_tasks(servers, deadline_seconds, 'to begin training')
  return train()


@contextlib.contextmanager
def _staying() -> Iterator[None]:
  """Context that goes on for a while after SIGTERM."""
  is_main = threading.current_thread() is threading.main_thread()
  if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
    # Signals do not arrive here, or the program has other plans for them.
    yield
    return
  # With the status that SIGTERM gives: it has not done its work.
  status = exit_codes.RESTARTABLE_EXIT_CODE
  # A thread: it ends the process while the main thread is in C++, too.
  end = threading.Timer(_STAY_SECONDS, _leave, [status])
  end.daemon = True

  def on_signal(*_) -> None:
    if end.ident is not None:
      _leave(status)
    end.start()

  signal.signal(signal.SIGTERM, on_signal)
  try:
    yield
  finally:
    end.cancel()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _serve(cluster: config.ClusterConfig) -> None:
  """Runs a TensorFlow server at this task's address until a signal comes."""
  status = exit_codes.terminated_exit_code()
  leaving = _Leaving(status, cluster.jobs.get('chief', {}).get(0))
  # TensorFlow takes seconds to load, and a signal may come meanwhile.
  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, leaving.on_signal)
  import tensorflow as tf

  task = f'{cluster.task_type} {cluster.task_index}'
  jobs = {j: dict(t) for j, t in cluster.jobs.items() if j != 'evaluator'}
  # Its port answers before the server is returned, and a signal that comes
  # meanwhile is handled as soon as it is.
  leaving.may_serve = True
  with reachability.serving(task, cluster.address):
    # No config: TensorFlow says how many inter-op threads there are.
    server = tf.distribute.Server(
      tf.train.ClusterSpec(jobs),
      job_name=cluster.task_type,
      task_index=cluster.task_index,
      protocol='grpc',
    )
  logging.info('%s serves at %s.', task, cluster.address)
  # In another thread: while the main thread is in C++, Python sees no signal.
  joining = threading.Thread(target=server.join, name='server', daemon=True)
  joining.start()
  # A signal that comes just before a wait begins does not interrupt it, and
  # Python calls the handler after it: hence many short waits.
  while joining.is_alive():
    joining.join(_SIGNAL_POLL_SECONDS)
    leaving.leave_if_due()


class _Leaving:
  """When a server ends after a signal: for a chief it stays until that has gone."""

  def __init__(self, status: int, chief: str | None):
    self.may_serve = False
    self._status = status
    self._chief = chief
    self._leaves_at: float | None = None
    self._unanswered = 0

  def on_signal(self, number: int, _: Any) -> None:
    stays = number == signal.SIGTERM and self.may_serve and self._chief
    if not stays or self._leaves_at is not None:
      _leave(self._status)
    self._leaves_at = time.monotonic() + _STAY_SECONDS

  def leave_if_due(self) -> None:
    if self._leaves_at is None:
      return
    is_silent = reachability.unreachable({'chief 0': self._chief})
    self._unanswered = self._unanswered + 1 if is_silent else 0
    has_gone = self._unanswered >= _PROBES_TILL_GONE
    if has_gone or time.monotonic() > self._leaves_at:
      _leave(self._status)


def _leave(status: int) -> NoReturn:
  """Ends the process at once, whatever it is doing.

  TensorFlow cannot stop a server, and an interpreter that is taken down while
  the server's threads run may crash or wait for them.
  """
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(Exception):
      stream.flush()
  os._exit(status)
