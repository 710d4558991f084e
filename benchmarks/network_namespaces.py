"""Simulated hosts: network namespaces on one machine, connected by slow links.

Processes of one machine communicate as fast as memory is copied, so a 16-bit wire
costs more than it saves. On these hosts a link has a chosen rate in each direction,
and can be cut:

  with network_namespaces.NetworkNamespaces(2, rate='200mbit') as hosts:
    hosts.run(0, ['ip', 'address'])
    hosts.cut_link(1)

Needs Linux, root, and iproute2. The hosts and the switch have their own namespaces,
so they neither change nor use the network of the machine, and simultaneous runs are
independent.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence

from benchmarks import processes
from tf_strategies import errors

# The network interface of each host.
INTERFACE = 'eth0'

_SECONDS = 20.0
_PREFIX = 'tfs-bench'
_NAME = re.compile(rf'{_PREFIX}-(\d+)-(?:switch|host\d+)')
_RATE = re.compile(r'([1-9]\d*)(kbit|mbit|gbit)')
_UNITS = {'kbit': 10**3, 'mbit': 10**6, 'gbit': 10**9}
# Token bucket of 4 ms. A smaller bucket would limit traffic below the rate.
_BURST_SECONDS = 0.004
_MIN_BURST_BYTES = 1 << 17
_MAX_HOSTS = 200


def bits_per_second(rate: str) -> int:
  """Returns a rate in bits per second.

  Example:

    >>> bits_per_second('200mbit')
    200000000

  Args:
    rate: an integer and kbit, mbit or gbit, as in tc.

  Raises:
    UnsupportedOptionError: if the rate has another format.
  """
  found = _RATE.fullmatch(rate)
  if found is None:
    raise errors.UnsupportedOptionError(
      f'the link rate {rate!r}',
      'an integer with kbit, mbit or gbit',
      "write for instance '200mbit'",
    )
  return int(found[1]) * _UNITS[found[2]]


def missing() -> str | None:
  """Returns why this machine cannot have test hosts, or None if it can."""
  for tool in ('ip', 'tc'):
    if shutil.which(tool) is None:
      return f'there is no {tool!r} here: install iproute2'
  if os.geteuid() != 0:
    return 'only root may make network namespaces'
  name = f'{_PREFIX}-{os.getpid()}-host{_MAX_HOSTS}'
  try:
    _call('ip', 'netns', 'add', name)
  except errors.Error as e:
    return f'network namespaces are not allowed here ({e})'
  try:
    # In the order in which a host needs them.
    _call('ip', '-n', name, 'link', 'add', 'name', 'bridge', 'type', 'bridge')
    _call('ip', '-n', name, 'link', 'add', 'name', 'port', 'type', 'veth')
    _call('tc', '-n', name, 'qdisc', 'add', 'dev', 'port', 'root', *_tbf(10**9))
  except errors.Error as e:
    return f'the kernel here lacks what the links are made of ({e})'
  finally:
    _delete(name)
  return None


def remove_leftovers() -> list[str]:
  """Removes the hosts of killed runs, and returns their names."""
  removed = []
  for line in _call('ip', 'netns', 'list').splitlines():
    found = _NAME.fullmatch(line.split()[0]) if line.split() else None
    if found is not None and not os.path.exists(f'/proc/{found[1]}'):
      _delete(found[0])
      removed.append(found[0])
  return removed


class NetworkNamespaces:
  """Network namespaces with addresses 10.77.0.1, 10.77.0.2 and so on.

  A context manager, which ends the programs on the hosts at exit.

  Args:
    count: number of hosts.
    rate: rate of each host's link to the switch, in each direction, such as '1gbit',
      or None for no limit.

  Attributes:
    addresses: addresses of the hosts.

  Raises:
    UnsupportedOptionError: if the rate is malformed, or the machine does not support
      network namespaces.
  """

  # Not a test.
  __test__ = False

  def __init__(self, count: int, rate: str | None = None):
    if not 1 <= count < _MAX_HOSTS:
      raise errors.UnsupportedOptionError(
        f'{count}', f'1 to {_MAX_HOSTS - 1} test hosts', 'ask for fewer'
      )
    self._rate = None if rate is None else bits_per_second(rate)
    self._switch = f'{_PREFIX}-{os.getpid()}-switch'
    self._names = [f'{_PREFIX}-{os.getpid()}-host{i}' for i in range(count)]
    self.addresses = tuple(f'10.77.0.{i + 1}' for i in range(count))

  def __enter__(self) -> NetworkNamespaces:
    reason = missing()
    if reason is not None:
      raise errors.UnsupportedOptionError(
        f'a machine that cannot have test hosts: {reason}',
        'Linux as root with iproute2',
        'measure without a link rate, over loopback',
      )
    remove_leftovers()
    try:
      self._make()
    except BaseException:
      self.close()
      raise
    return self

  def __exit__(self, *unused):
    self.close()

  def command(self, host: int, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs `arguments` on a host.

    `ip netns exec` replaces itself by the program, so that the process id is the
    program's.

    Args:
      host: number of the host, from 0.
      arguments: the program and its arguments.
    """
    return ['ip', 'netns', 'exec', self._names[host], *arguments]

  def run(
    self, host: int, arguments: Sequence[str], timeout: float = _SECONDS
  ) -> subprocess.CompletedProcess:
    """Runs a program on a host until it ends. Its output is text.

    Args:
      host: number of the host, from 0.
      arguments: the program and its arguments.
      timeout: seconds until it is killed.

    Raises:
      WorkerUnavailableError: if it took longer.
    """
    return processes.run(
      self.command(host, arguments), deadline_seconds=timeout
    )

  def cut_link(self, host: int) -> None:
    """Disconnects a host from the network, without closing its connections."""
    self._set_link(host, 'down')

  def restore_link(self, host: int) -> None:
    """Connects a host to the network again."""
    self._set_link(host, 'up')

  def close(self) -> None:
    """Ends the programs on the hosts, and removes the hosts. May be called twice."""
    for name in (*self._names, self._switch):
      _delete(name)

  def _set_link(self, host: int, state: str) -> None:
    # Cut at the switch, so that the host keeps its address and its routes, as with
    # an unplugged cable.
    _call('ip', '-n', self._switch, 'link', 'set', f'port{host}', state)

  def _make(self) -> None:
    _call('ip', 'netns', 'add', self._switch)
    switch = ('ip', '-n', self._switch)
    _call(*switch, 'link', 'add', 'name', 'bridge', 'type', 'bridge')
    _call(*switch, 'link', 'set', 'bridge', 'up')
    for index, name in enumerate(self._names):
      self._add_host(switch, index, name)

  def _add_host(self, switch: tuple[str, ...], index: int, name: str) -> None:
    port = f'port{index}'
    _call('ip', 'netns', 'add', name)
    host = ('ip', '-n', name)
    peer = ('type', 'veth', 'peer', 'name', INTERFACE, 'netns', name)
    _call(*switch, 'link', 'add', 'name', port, *peer)
    _call(*switch, 'link', 'set', port, 'master', 'bridge', 'up')
    address = f'{self.addresses[index]}/24'
    _call(*host, 'address', 'add', address, 'dev', INTERFACE)
    for interface in ('lo', INTERFACE):
      _call(*host, 'link', 'set', interface, 'up')
    # Outgoing traffic is limited at the host, incoming traffic at the switch.
    self._limit(self._switch, port)
    self._limit(name, INTERFACE)

  def _limit(self, namespace: str, interface: str) -> None:
    if self._rate is not None:
      add = ('tc', '-n', namespace, 'qdisc', 'add', 'dev', interface, 'root')
      _call(*add, *_tbf(self._rate))


def _tbf(rate: int) -> tuple[str, ...]:
  burst = max(_MIN_BURST_BYTES, int(rate / 8 * _BURST_SECONDS))
  return (
    *('tbf', 'rate', f'{rate}bit', 'burst', str(burst)),
    *('latency', '100ms'),
  )


def _call(*arguments: str) -> str:
  """Runs a tool and returns its output."""
  done = processes.run(arguments, deadline_seconds=_SECONDS)
  if done.returncode:
    raise errors.UnsupportedOptionError(
      f'Expected `{" ".join(arguments)}` to succeed, got: '
      f'{_error_text(done)}. Fix: run it by hand as root to see more.'
    )
  return done.stdout


def _error_text(done: subprocess.CompletedProcess) -> str:
  return done.stderr.strip().rstrip('.') or f'status {done.returncode}'


def _delete(name: str) -> None:
  """Removes a namespace with its programs and links."""
  words = ('ip', 'netns', 'pids', name)
  pids = processes.run(words, deadline_seconds=_SECONDS)
  for pid in pids.stdout.split():
    try:
      os.kill(int(pid), signal.SIGKILL)
    except ProcessLookupError:
      continue  # It has already ended.
  processes.run(('ip', 'netns', 'delete', name), deadline_seconds=_SECONDS)
