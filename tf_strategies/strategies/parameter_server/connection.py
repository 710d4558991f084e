"""The chief's connection to its cluster: who is alive, and who drives it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors
from tf_strategies.checkpoint import ownership
from tf_strategies.cluster import config as config_lib
from tf_strategies.cluster import reachability
from tf_strategies.strategies.parameter_server import keepalive

_FIX = (
  "list them in TF_CONFIG's cluster, as python -m tf_strategies.launch "
  '--num_workers=2 --num_ps=2 --chief does'
)
_PROBE_SECONDS = 10.0
_SILENT_SECONDS = 1.0
# A server's port opens a moment before it answers calls.
_SETTLE_SECONDS = 0.3
_UNSETTLED_SECONDS = 5.0
# Connecting waits for tasks that have died since they were looked for.
_CONNECT_SECONDS = 60.0
# Between two looks whether another chief drives the servers.
_LEASE_SECONDS = 1.0
# Between two warnings that these looks fail.
_WARN_SECONDS = 60.0

_HELLO, _NOTHING = keepalive.Answer.HELLO, keepalive.Answer.NOTHING

Task = tuple[str, int]


def checked_cluster(
  cluster: config_lib.ClusterConfig | None,
) -> config_lib.ClusterConfig:
  """The cluster that this process coordinates, which must be complete."""
  cluster = config_lib.given_or_from_env(cluster)
  if cluster is None:
    raise errors.ClusterConfigError(
      'Expected a cluster with worker and ps tasks for '
      f'ParameterServerStrategy, got none: TF_CONFIG is not set. Fix: {_FIX}, '
      "or train on one device: tfs.create_strategy('one_device')."
    )
  for job in ('ps', 'worker'):
    if job not in cluster.jobs:
      raise errors.ClusterConfigError(
        f'Expected at least one {job} task in the cluster, got none. Fix: '
        f'{_FIX}.'
      )
  if cluster.task_type != 'chief':
    raise errors.ClusterConfigError(
      f"Expected task 'chief', got task {cluster.task_type!r} "
      f'{cluster.task_index}. Fix: start the program through '
      'tfs.cluster.run_task(train), which makes ps and worker tasks serve.'
    )
  return cluster


def resolver(
  cluster: config_lib.ClusterConfig,
) -> tf.distribute.cluster_resolver.ClusterResolver:
  """Describes the cluster to TensorFlow, without the evaluator."""
  jobs = {
    job: list(addresses)
    for job, addresses in cluster.jobs.items()
    if job != 'evaluator'
  }
  return tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(jobs), task_type='chief', task_id=0, rpc_layer='grpc'
  )


def is_connected(cluster: config_lib.ClusterConfig) -> bool:
  """Returns whether this process is connected to it: again would cut off variables."""
  # Without it a call to a dead task waits for it to come back.
  os.environ.setdefault('GRPC_FAIL_FAST', 'use_caller')
  connected = _tf_internal.connected_cluster()
  if connected is None:
    return False
  found = {job.name: dict(job.tasks) for job in connected.cluster.job}
  return all(
    found.get(job) == dict(enumerate(cluster.jobs[job]))
    for job in ('ps', 'worker')
  )


def addresses(cluster: config_lib.ClusterConfig) -> dict[Task, str]:
  """'host:port' of each server and worker."""
  return {
    (job, index): address
    for job in ('ps', 'worker')
    for index, address in enumerate(cluster.jobs[job])
  }


def wait_for_tasks(
  tasks: dict[Task, str], deadline_seconds: float, what_for: str
) -> None:
  """Waits until every task listens; at the deadline, names those that do not."""
  by_name = {f'{job} {i}': address for (job, i), address in tasks.items()}
  reachability.wait_for_tasks(by_name, deadline_seconds, what_for)


def unavailable(
  message: str, server: int, address: str
) -> errors.ParameterServerUnavailableError:
  """Returns an error that names a parameter server."""
  error = errors.ParameterServerUnavailableError(message)
  error.server, error.address = server, address
  return error


class Liveness:
  """Tells dead tasks from living ones, and connects to restarted ones.

  A restarted task is another process: what this process had there (variables,
  iterators, functions) is gone, so it counts as dead until `rejoin` or
  `wait_for_all`. Connecting to one connects to all. Tasks that are other processes by
  then still count as dead, also those that died meanwhile. A server does until
  `wait_for_all`, because nobody has restored its variables.

  Whether a task answers at all is seen by the first bytes of HTTP/2, which gRPC
  speaks; whether it is the one that was connected to, by running an op there.
  TensorFlow's own `check_alive` says yes for a restarted task, and a stopped
  one blocks it, and with it all threads of Python, forever.

  Calls to a task that answers nothing for `keepalive_timeout` seconds are ended,
  so that it counts as dead.

  After `hold_lease` all calls are ended when another chief has taken the servers;
  from then on whatever asks for servers raises a TakenOverError.
  """

  def __init__(
    self,
    cluster: config_lib.ClusterConfig,
    keepalive_timeout: float = 60.0,
  ):
    self._addresses = addresses(cluster)
    self._servers = {task for task in self._addresses if task[0] == 'ps'}
    self._lock = threading.Lock()
    # While it reconnects, tasks cannot be told apart.
    self._is_settled = threading.Event()
    self._is_settled.set()
    self._changed_at = -math.inf
    # That were connected to again, and nobody has taken them up.
    self._are_new: set[Task] = set()
    # That ended while they were connected to: maybe one process was asked, and
    # another one joined.
    self._are_mixed: set[Task] = set()
    self._keepalive = keepalive.Keepalive(self._addresses, keepalive_timeout)
    self._is_closed = False
    self._lease: Lease | None = None
    self._taken: errors.TakenOverError | None = None

  def hold_lease(
    self, lease: Lease, on_taken: Callable[[Exception], None]
  ) -> None:
    """Takes the servers for this chief, and watches for a newer one.

    Args:
      lease: the claim of this chief.
      on_taken: called when another chief has taken the servers; returns when
        nothing runs.

    Raises:
      ParameterServerUnavailableError: server 0 does not answer.
    """
    try:
      lease.take()
    except tf.errors.OpError as e:
      raise self.server_error() or self._error_of(0) from e
    self._lease = lease
    threading.Thread(
      target=self._watch_lease, args=(on_taken,), name='tfs-lease', daemon=True
    ).start()

  def address(self, job: str, index: int) -> str:
    """Returns the address of a task."""
    return self._addresses[job, index]

  def is_worker_alive(self, worker: int) -> bool:
    """Returns whether it is the process that was connected to; maybe a silent one."""
    return not self._gone([('worker', worker)])

  def silent_tasks(self) -> list[str]:
    """Names of the tasks that do not answer."""
    return [
      f'{job} {index} at {self.address(job, index)}'
      for (job, index), answer in self._ask(self._addresses).items()
      if answer is not _HELLO
    ]

  def server_error(self) -> errors.ParameterServerUnavailableError | None:
    """The error that names a server whose variables are gone, if there is one.

    Raises:
      TakenOverError: another chief drives the servers.
    """
    self._check_taken()
    gone = self._gone(self._servers)
    if gone:  # A connection that breaks may have refused once.
      time.sleep(_SETTLE_SECONDS)
      gone = self._gone(gone)
    if not gone:
      return None
    return self._error_of(min(gone)[1])

  def _error_of(self, server: int) -> errors.ParameterServerUnavailableError:
    address = self.address('ps', server)
    return unavailable(
      f'parameter server ps {server} at {address} died or was restarted: its '
      'variables are gone. Fix: restart it. With checkpoint_dir=... training '
      'continues by itself from the latest checkpoint; without it restart the '
      'chief.',
      server,
      address,
    )

  def broken_update(self) -> errors.ParameterServerUnavailableError:
    """Returns the error for an update that some servers may not have applied."""
    return unavailable(
      'Expected an update of parameter servers that is applied as a whole, '
      'got a broken connection. Fix: set checkpoint_dir, and training '
      'continues by itself from the latest checkpoint; without it restart '
      'the chief.',
      0,
      self.address('ps', 0),
    )

  def wait_for_answers(self) -> None:
    """Waits while a task is silent that is not yet given up.

    Raises:
      ParameterServerUnavailableError: a server was given up.
    """
    while not self._is_closed:
      self._check_taken()
      given_up = {
        t for t in self._addresses if self._keepalive.is_disconnected(t)
      }
      if given_up & self._servers:
        raise self._error_of(min(given_up & self._servers)[1])
      asked = {t: a for t, a in self._addresses.items() if t not in given_up}
      if _NOTHING not in keepalive.ask_all(asked, _SILENT_SECONDS).values():
        return

  def is_complete(self) -> bool:
    """Returns whether every task answers, for which connecting to one waits."""
    return set(keepalive.ask_all(self._addresses).values()) == {_HELLO}

  def changed_recently(self) -> bool:
    """Returns whether it has just reconnected, while which any op may fail."""
    return time.monotonic() - self._changed_at < _UNSETTLED_SECONDS

  def rejoin(self, worker: int) -> bool:
    """Connects to a worker that was restarted; returns whether it can be used."""
    task = 'worker', worker
    with self._lock:
      self._check_taken()
      # Another thread may have connected to all of them.
      answers = self._ask(self._addresses)
      if answers[task] is not _HELLO or self._are_mixed:
        if _NOTHING in answers.values():
          return False
        self._connect_again()
        answers = self._ask([task])
      is_back = answers[task] is _HELLO and not self._are_mixed
      if is_back:
        self._are_new.discard(task)
      return is_back

  def wait_for_all(self, deadline_seconds: float) -> None:
    """Waits until every task answers, and connects to all of them.

    The caller restores the variables of all servers afterwards.
    """
    ends_at = time.monotonic() + deadline_seconds
    while True:
      self._check_taken()
      left = max(0.0, ends_at - time.monotonic())
      wait_for_tasks(self._addresses, left, 'to continue training')
      with self._lock:
        answers = self._ask(self._addresses)
        silent = [t for t, a in answers.items() if a is _NOTHING]
        if not silent:
          self._connect_again()
          # Else somebody has died meanwhile: again, as often as somebody does.
          if not self._are_mixed:
            self._are_new.clear()
            return
      if silent and time.monotonic() > ends_at:
        job, index = silent[0]
        raise errors.RendezvousError(
          f'Expected an answer from {job} {index} at '
          f'{self.address(job, index)} within {deadline_seconds:g} s to '
          'continue training, got none. Fix: end it and restart it.'
        )

  def close(self) -> None:
    """Ends the threads, and lets another chief have the servers."""
    if self._lease is not None and not self._is_closed and not self._taken:
      # Not for longer: the server may be silent.
      reachability.concurrently(
        lambda _: self._lease.leave(), [0], None, _LEASE_SECONDS
      )
    self._is_closed = True
    self._keepalive.close()

  def _check_taken(self) -> None:
    if self._taken is not None:
      raise self._taken

  def _watch_lease(self, on_taken: Callable[[Exception], None]) -> None:
    while not self._is_closed and self._taken is None:
      time.sleep(_LEASE_SECONDS)
      self._is_settled.wait(_LEASE_SECONDS)
      try:
        self._lease.check()
      except errors.TakenOverError as e:
        self._taken = e
      except tf.errors.OpError:
        continue  # Server 0 is gone, or a connection is being made.
      # Nobody else would notice that the watch has ended.
      except Exception as e:
        logging.log_every_n_seconds(
          logging.WARNING,
          'This chief cannot tell whether another chief has taken the parameter '
          'servers (%s: %s), and asks again.',
          _WARN_SECONDS,
          type(e).__name__,
          e,
        )
    if self._taken is None:
      return
    logging.error('%s', self._taken)
    on_taken(self._taken)
    self._lease.leave()
    # Waiting calls may be waiting for calls of the other chief.
    while not self._is_closed:
      time.sleep(_LEASE_SECONDS)
      for address in self._addresses.values():
        keepalive.disconnect(keepalive.peers_of(address))

  def _gone(self, tasks: Iterable[Task]) -> set[Task]:
    """Returns the tasks that are dead or were restarted."""
    return {
      task
      for task, answer in self._ask(tasks).items()
      if answer is keepalive.Answer.REFUSED
      or task in self._are_new
      or self._keepalive.is_disconnected(task)
    }

  def _ask(self, tasks: Iterable[Task]) -> dict[Task, keepalive.Answer]:
    """Asks tasks, all at the same time; another process refuses."""
    ends_at = time.monotonic() + _CONNECT_SECONDS
    while True:
      self._is_settled.wait(max(0.0, ends_at - time.monotonic()))
      changed_at = self._changed_at
      found = reachability.concurrently(
        self._ask_one, tasks, _NOTHING, _PROBE_SECONDS
      )
      # Tasks may seem dead while they are connected to.
      is_sure = self._changed_at == changed_at and self._is_settled.is_set()
      if is_sure or time.monotonic() > ends_at:
        return found

  def _ask_one(self, task: Task) -> keepalive.Answer:
    answer = keepalive.ask(self._addresses[task])
    # No op is run where nobody answers: it might not return.
    is_known = answer is not _HELLO or (
      not self._keepalive.is_disconnected(task) and _runs_ops(*task)
    )
    return answer if is_known else keepalive.Answer.REFUSED

  def _connect_again(self):
    """Connects to every task, for which it waits: none may be silent."""
    self._is_settled.clear()
    self._changed_at = math.inf
    try:
      time.sleep(_SETTLE_SECONDS)
      # They lack the functions that were traced meanwhile.
      given_up = set(filter(self._keepalive.is_disconnected, self._addresses))
      self._are_new |= given_up & self._servers
      before = _tf_internal.incarnations()
      with keepalive.watching(self._addresses) as ended:
        try:
          _tf_internal.connect_again(anew=self._are_mixed | given_up)
        finally:  # Of an attempt that fails some tasks may know.
          self._are_mixed = ended()
          after = _tf_internal.incarnations()
          self._are_new |= {
            t for t in self._addresses if before.get(t) != after.get(t)
          }
      self._keepalive.reset()
    finally:
      self._changed_at = time.monotonic()
      self._is_settled.set()


def _runs_ops(job: str, index: int) -> bool:
  """Returns whether a task knows this process and runs its operations."""
  try:
    device = f'/job:{job}/replica:0/task:{index}/device:CPU:0'
    with _tf_internal.on_task(device, 1) as [one]:
      return int(tf.identity(one).numpy()) == 1
  except tf.errors.OpError:
    return False


_FILE = 'ram://tf_strategies/chiefs'
_SERVER = '/job:ps/replica:0/task:0/device:CPU:0'
# Several times what an older chief takes to notice; it may be cut off, or dead.
_LEAVE_SECONDS = 15.0
_POLL_SECONDS = 0.2


class Lease:
  """Claims the servers for this chief: the one that connected last drives them.

  Each chief adds a record of itself to a file in the memory of server 0, in
  TensorFlow's `ram://` file system, and then watches the file. A chief that finds a
  newer one begins no further steps, adds that it has left, and ends with an error. The
  newer one waits for that: steps of two chiefs on one worker would wait for each other.
  """

  def __init__(self):
    self._record = ownership.new_record()

  def take(self) -> None:
    """Makes this process the one that drives the servers."""
    records = _read()
    older = _newest(records)
    self._add(self._record)
    if (
      older is None
      or ownership.is_of_this_process(older)
      or ownership.is_dead(older)
    ):
      return
    logging.warning(
      'The parameter servers belonged to %s. Waiting up to %.0f s until it has left.',
      ownership.describe(older),
      _LEAVE_SECONDS,
    )
    ends_at = time.monotonic() + _LEAVE_SECONDS
    while time.monotonic() < ends_at:
      # Not what that process has left before.
      if {'left': older['process']} in _read()[len(records) :]:
        return
      time.sleep(_POLL_SECONDS)

  def check(self) -> None:
    """Checks that no newer chief is connected.

    Raises:
      TakenOverError: there is one.
      tf.errors.OpError: server 0 cannot tell.
    """
    newest = _newest(_read())
    if newest is None:  # The server was restarted.
      self._add(self._record)
    elif not ownership.is_of_this_process(newest):
      raise errors.TakenOverError(
        f'Expected one chief, got {ownership.describe(newest)}, which has '
        'taken over the parameter servers. Fix: start one chief for each '
        'job; nothing is to be done if a scheduler has replaced this one.'
      )

  def leave(self) -> None:
    """Tells a newer chief that this one begins no further steps."""
    with contextlib.suppress(tf.errors.OpError):
      self._add({'left': self._record['process']})

  def _add(self, record: dict[str, Any]) -> None:
    with _tf_internal.on_task(
      _SERVER, _FILE, json.dumps(record) + '\n'
    ) as args:
      # Files of this file system grow when they are written again.
      tf.raw_ops.WriteFile(filename=args[0], contents=args[1])


def _read() -> list[dict[str, Any]]:
  """Returns all records, oldest first."""
  try:
    with _tf_internal.on_task(_SERVER, _FILE) as args:
      text = tf.raw_ops.ReadFile(filename=args[0]).numpy().decode()
  except tf.errors.NotFoundError:
    return []
  return [json.loads(line) for line in text.splitlines()]


def _newest(records: list[dict[str, Any]]) -> dict[str, Any] | None:
  """Returns the record of the newest chief, None if it has left."""
  newest = None
  for record in records:
    if 'left' not in record:
      newest = record
    elif newest is not None and record['left'] == newest['process']:
      newest = None
  return newest
