"""Checks of the addresses of a cluster before anybody is asked."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from tf_strategies import errors
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
  if task not in addresses:
    raise errors.ClusterConfigError(
      f'Task {task!r} is not one of {sorted(addresses)}. Pass the number of '
      'this process in the cluster.'
    )
  same_user = options.credentials().same_user
  seen: dict[str, int] = {}
  for number, address in sorted(addresses.items()):
    host, _ = connection_lib.split_address(address)
    if address in seen:
      raise errors.ClusterConfigError(
        f'Tasks {seen[address]} and {number} have the same address {address}. '
        'Give each its own port.'
      )
    seen[address] = number
    if same_user and not _is_loopback(host):
      raise errors.UnsupportedOptionError(
        f'the address {address} of task {number} without a secret',
        'addresses of this host alone (127.0.0.1, ::1, localhost)',
        'set TFS_SECRET (or TFS_SECRET_FILE) on all workers and use '
        'GroupOptions.from_env(); or pass allow_unauthenticated=True where '
        'the network keeps everybody else out',
      )
  if same_user and not local_users.is_known():
    raise errors.UnsupportedOptionError(
      'a group without a secret on an operating system that does not tell '
      'whose process a connection comes from',
      'a secret, as every user of this host can connect',
      'set TFS_SECRET to the same 16 bytes or more on all workers and use '
      'GroupOptions.from_env(); or pass allow_unauthenticated=True',
    )
  minimum = options.min_workers
  if isinstance(minimum, int) and minimum > len(addresses):
    raise errors.UnsupportedOptionError(
      f'min_workers={options.min_workers} with {len(addresses)} addresses',
      f'at most {len(addresses)}',
      'lower it, or add addresses',
    )


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'
