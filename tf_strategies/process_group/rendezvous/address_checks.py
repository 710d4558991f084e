"""Checks of the addresses of a cluster."""

import ipaddress
from collections.abc import Mapping

from tf_strategies import option_checks
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group.network import connection as connection_lib
from tf_strategies.process_group.network import local_users


def check(
  addresses: Mapping[int, str], options: options_lib.GroupOptions
) -> None:
  """Raises an error where these can never form a group.

  Raises:
    ClusterConfigError: an address is malformed.
    UnsupportedOptionError: addresses that need a secret; more workers than there are.
  """
  same_user = options.same_user
  for number, address in addresses.items():
    host, _ = connection_lib.split_address(address)
    option_checks.check(
      not same_user or _is_loopback(host),
      f'{address} of task {number}',
      'addresses of this host (127.0.0.1, ::1, localhost) without a secret',
      'set TFS_SECRET (or TFS_SECRET_FILE) on all workers and use '
      'GroupOptions.from_env(); or pass allow_unauthenticated=True where '
      'the network keeps everybody else out',
    )
  option_checks.check(
    not same_user or local_users.is_known(),
    'a group without one',
    'a secret on this operating system',
    'set TFS_SECRET to the same 16 bytes or more on all workers and use '
    'GroupOptions.from_env(); or pass allow_unauthenticated=True. The '
    'system does not tell whose process a connection comes from',
  )
  minimum = options.min_workers
  option_checks.check(
    not option_checks.is_int(minimum) or minimum <= len(addresses),
    f'min_workers={minimum}',
    f'min_workers of at most {len(addresses)}, the number of addresses',
    'lower it, or add addresses',
  )


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'
