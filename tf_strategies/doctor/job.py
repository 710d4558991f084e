"""Checks the cluster of the environment: secret, TLS, port and other tasks."""

from __future__ import annotations

import contextlib
import errno
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tf_strategies import errors, process_group
from tf_strategies.cluster import ClusterConfig, reachability, workers
from tf_strategies.doctor import findings
from tf_strategies.doctor.findings import FAIL, NOTE, OK, Finding
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group.network import server, tls
from tf_strategies.process_group.rendezvous import address_checks

# Clocks that differ by more make timelines and certificates doubtful.
_CLOCKS_APART_SECONDS = 2.0
_ANSWER_SECONDS = 3.0
# Beyond what travels as a small message: it shows how arrays do.
_ARRAY = 1 << 18


def look(
  environ: Mapping[str, str] = os.environ,
  wait: float = 0.0,
  versions: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
  """Yields the findings.

  Args:
    environ: environment with TF_CONFIG, or with a scheduler's variables.
    wait: seconds until all tasks of the job must run this too; 0 waits for nobody.
    versions: versions that must be the same in all tasks.
  """
  try:
    cluster = ClusterConfig.from_env(environ)
  except errors.ClusterConfigError as e:
    yield findings.failed('TF_CONFIG', e)
    return
  if cluster is None:
    yield Finding(OK, 'TF_CONFIG', 'none: this process trains alone')
  else:
    counts = ', '.join(f'{len(t)} {job}' for job, t in cluster.jobs.items())
    me = f'{cluster.task_type} {cluster.task_index}'
    where = f' at {cluster.address}' if cluster.address else ''
    yield Finding(OK, 'TF_CONFIG', f'{me} of {counts}{where}')
  found = [findings.of('secret', _secret, cluster), findings.of('TLS', _tls)]
  if cluster is not None:
    found.append(findings.of('port', _port, cluster))
    found.append(findings.of('other tasks', _tasks, cluster, wait))
  yield from found
  if cluster is not None and cluster.address and wait:
    if FAIL not in [finding.state for finding in found]:
      yield from _meet(cluster, wait, versions or {})
    else:
      what = 'not tried, since something above failed'
      yield Finding(NOTE, 'meeting', what)


def _secret(cluster: ClusterConfig | None) -> str:
  options = process_group.GroupOptions.from_env(tls=None)
  has_tls = any(map(os.environ.get, options_lib.TLS_VARIABLES))
  if cluster is not None and cluster.address and not has_tls:
    address_checks.check(*_places(cluster), _options(cluster, tls=None))
  if options.secret is None:
    return 'none, and none is needed on one host'
  return f'of {len(options.secret)} bytes'


def _tls() -> str | Finding:
  files = process_group.GroupOptions.from_env(secret=None).tls
  if files is None:
    return 'none: what workers send is not encrypted'
  try:
    _shake_hands(files)
  except ssl.SSLError as e:
    why = getattr(e, 'verify_message', '') or e.reason or e
    return Finding(
      FAIL,
      'TLS',
      f'{files.certificate} is not accepted by who trusts {files.authority}: {why}',
      f'sign it with that authority, or set {options_lib.TLS_VARIABLES[2]} to the '
      'one that did; see that it has not expired',
    )
  return f'{files.certificate}, signed by {files.authority}'


def _shake_hands(files: tls.TlsFiles) -> None:
  """Has a worker with these files meet another one with them, in memory."""
  to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
  client = tls.context_of(files, False).wrap_bio(to_client, to_server)
  server_ = tls.context_of(files, True).wrap_bio(
    to_server, to_client, server_side=True
  )
  # The client's hello, the server's, the client's certificate and its check.
  for side in (client, server_, client, server_):
    with contextlib.suppress(ssl.SSLWantReadError):
      side.do_handshake()


def _port(cluster: ClusterConfig) -> str:
  if not cluster.address:
    return 'this task listens nowhere'
  places, task = _places(cluster)
  server.listen(places[task], task).close()
  return f'{places[task]} is free, and of this host'


def _tasks(cluster: ClusterConfig, wait: float) -> str | Finding:
  others = {
    task: address
    for task, address in _tasks_of(cluster).items()
    if address != cluster.address
  }
  if not others:
    return 'there are none'
  outcomes = reachability.unreachable(others, _ANSWER_SECONDS)
  nobody = os.strerror(errno.ECONNREFUSED)
  silent = [t for t, outcome in outcomes.items() if outcome == nobody]
  lost = {t: o for t, o in outcomes.items() if o != nobody}
  if lost:
    each = ', '.join(f'{t} at {others[t]} ({o})' for t, o in lost.items())
    return Finding(
      FAIL,
      'other tasks',
      f'not reached: {each}',
      'see that these hosts are up, that their names have addresses here (in '
      'Kubernetes a headless service has to select the pods), and that no firewall '
      'is between',
    )
  if silent:
    what = (
      f'{", ".join(silent)}: the host answers, and nothing listens there yet'
    )
    fix = 'run this on all tasks at once, with --wait=60, to see whether they can meet'
    # Tasks may start a little later. The meeting finds out.
    return Finding(NOTE, 'other tasks', what, '' if wait else fix)
  return f'something accepts connections at each of the {len(others)}'


def _meet(
  cluster: ClusterConfig, wait: float, versions: Mapping[str, Any]
) -> Iterator[Finding]:
  """Forms a group of all tasks, as training would."""
  places, task = _places(cluster)
  others = _options(cluster, rendezvous_timeout_seconds=wait)
  try:
    with (
      process_group.Rendezvous(places, task, others) as meeting,
      meeting.form() as group,
    ):
      size = group.world_size
      yield Finding(OK, 'meeting', f'{size} tasks met, and trust each other')
      what = 'the versions of TensorFlow and Keras'
      workers.agree(group.exchange, dict(versions), what)
      group.all_reduce(np.zeros(_ARRAY, np.float32))
      yield Finding(OK, 'links', _links(group.paths()))
      group.barrier()
      yield _clocks(group.all_gather(np.float64([time.time()])))
      group.barrier()
  except errors.Error as e:
    yield findings.failed('meeting', e)


def _links(paths: Mapping[int, str]) -> str:
  kinds: dict[str, list[int]] = {}
  for rank, kind in paths.items():
    kinds.setdefault(kind, []).append(rank)
  return '; '.join(
    f'to {", ".join(map(str, ranks))} by {kind}'
    for kind, ranks in kinds.items()
  )


def _clocks(times: np.ndarray) -> Finding:
  apart = float(np.max(times) - np.min(times))
  if apart <= _CLOCKS_APART_SECONDS:
    return Finding(OK, 'clocks', f'within {apart:.2f} s of each other')
  slow = int(np.argmin(times))
  what = f'{apart:.1f} s apart; that of task {slow} is the slowest'
  return Finding(NOTE, 'clocks', what, 'keep them by NTP')


def _tasks_of(cluster: ClusterConfig) -> dict[str, str]:
  """Returns the address of each task by its name."""
  return {
    f'{job} {index}': address
    for job, tasks in cluster.jobs.items()
    for index, address in tasks.items()
  }


def _places(cluster: ClusterConfig) -> tuple[dict[int, str], int]:
  """Returns the addresses of all tasks by number, and the number of this one."""
  addresses = list(_tasks_of(cluster).values())
  return dict(enumerate(addresses)), addresses.index(cluster.address)


def _options(
  cluster: ClusterConfig, **options: Any
) -> process_group.GroupOptions:
  """Returns the options of training. Parameter servers use gRPC, without a secret."""
  has_servers = 'ps' in cluster.jobs
  return process_group.GroupOptions.from_env(
    allow_unauthenticated=has_servers, **options
  )
