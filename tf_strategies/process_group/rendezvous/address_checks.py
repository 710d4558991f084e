"""Checks of the addresses of a cluster, and that all have the same."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from tf_strategies import errors, option_checks, version
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import local_users


def check(
  addresses: Mapping[int, str], task: int, options: options_lib.GroupOptions
) -> None:
  """Raises an error where these can never form a group.

  Raises:
    ClusterConfigError: the task has no address, or two have the same.
    UnsupportedOptionError: addresses that need a secret; more workers than there are.
  """
  option_checks.check(
    isinstance(addresses, Mapping)
    and all(map(option_checks.is_int, addresses)),
    f'addresses={addresses!r}',
    "a dict from task numbers to 'host:port'",
    "write for instance {0: 'host0:2222', 1: 'host1:2222'}",
  )
  option_checks.check_int(
    'task', task, 0, fix='pass the number of this process'
  )
  if task not in addresses:
    raise errors.ClusterConfigError(
      f'Expected a task among {sorted(addresses)}, got task {task!r}. Fix: '
      'pass the number of this process in the cluster.'
    )
  same_user = options.credentials().same_user
  seen: dict[str, int] = {}
  for number, address in sorted(addresses.items()):
    host, _ = connection_lib.split_address(address)
    if address in seen:
      raise errors.ClusterConfigError(
        f'Expected an address of its own for each task, got {address} for '
        f'tasks {seen[address]} and {number}. Fix: give each its own port.'
      )
    seen[address] = number
    if same_user and not _is_loopback(host):
      raise errors.UnsupportedOptionError(
        f'{address} of task {number}',
        'addresses of this host (127.0.0.1, ::1, localhost) without a secret',
        'set TFS_SECRET (or TFS_SECRET_FILE) on all workers and use '
        'GroupOptions.from_env(); or pass allow_unauthenticated=True where '
        'the network keeps everybody else out',
      )
  if same_user and not local_users.is_known():
    raise errors.UnsupportedOptionError(
      'a group without one',
      'a secret on this operating system',
      'set TFS_SECRET to the same 16 bytes or more on all workers and use '
      'GroupOptions.from_env(); or pass allow_unauthenticated=True. The '
      'system does not tell whose process a connection comes from',
    )
  minimum = options.min_workers
  if option_checks.is_int(minimum) and minimum > len(addresses):
    raise errors.UnsupportedOptionError(
      f'min_workers={options.min_workers}',
      f'min_workers of at most {len(addresses)}, the number of addresses',
      'lower it, or add addresses',
    )


def check_same_job(
  message: Mapping[str, Any],
  task: int,
  incarnation: str,
  addresses: Mapping[str, str],
) -> None:
  """Checks a task's `hello` against this task's knowledge.

  Raises:
    RendezvousError: the task runs another version.
    ClusterConfigError: the task has other addresses, or this one's number.
  """
  other = message['task']
  if message['version'] != version.__version__:
    raise errors.RendezvousError(
      f'Expected tf_strategies {version.__version__} of task {task} '
      f'everywhere, got {message["version"]} on task {other}. Fix: install '
      'the same version everywhere.'
    )
  theirs, differing = message['addresses'], []
  if theirs is not None and theirs != addresses:
    differing = [
      f'task {t} is at {addresses.get(t, "no address")} here and at '
      f'{theirs.get(t, "no address")} there'
      for t in sorted({*theirs, *addresses})
      if theirs.get(t) != addresses.get(t)
    ]
  if other == task or str(other) not in addresses:
    differing.append(f'both claim to be task {other}')
  if differing:
    raise errors.ClusterConfigError(
      f'Task {task} ({incarnation}) and task {other} '
      f'({message["incarnation"]}) have different descriptions of the '
      f'cluster: {"; ".join(differing[:4])}. Fix: give all workers the same '
      'one, and each its own task.'
    )


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'
