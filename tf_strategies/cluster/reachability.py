"""Which tasks of a job accept connections, and waiting until all of them do."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from absl import logging

from tf_strategies import errors, option_checks
from tf_strategies.cluster import checks

_POLL_SECONDS = 0.2
_PROBE_SECONDS = 1.0
_SECONDS_BETWEEN_LOGS = 5.0


def unreachable(
  tasks: Mapping[str, str], timeout: float = _PROBE_SECONDS
) -> dict[str, str]:
  """Why tasks do not accept a TCP connection, in the operating system's words.

  Args:
    tasks: 'host:port' of each by its name, such as 'worker 1'.
    timeout: seconds to wait for all answers, name look-up included.

  Example:

    >>> list(unreachable({'worker 1': 'no-such-host.invalid:2222'}))
    ['worker 1']
  """
  option_checks.check_seconds('timeout', timeout)
  return _ask(tasks, timeout, {})


def wait_for_tasks(
  tasks: Mapping[str, str], deadline_seconds: float, what_for: str = ''
) -> None:
  """Returns when all tasks accept connections; a deadline of 0 asks once.

  Raises:
    RendezvousError: some do not answer at the deadline; names each, its address
      and the outcome of the last attempt, and `what_for` ('to train').
    ClusterConfigError: an address is malformed.
    UnsupportedOptionError: `deadline_seconds` is negative or not finite.
  """
  option_checks.check_seconds(
    'deadline_seconds', deadline_seconds, or_zero=True
  )
  purpose = f' {what_for}' if what_for else ''
  start = time.monotonic()
  ends_at = start + float(deadline_seconds)
  log_at = start
  probes: dict[str, _Probe] = {}
  while True:
    left = ends_at - time.monotonic()
    # The last attempt, too, must leave time for an answer.
    missing = _ask(tasks, min(_PROBE_SECONDS, max(left, _POLL_SECONDS)), probes)
    if not missing:
      return
    now = time.monotonic()
    if now >= ends_at:
      each = ', '.join(
        f'{name} at {tasks[name]} ({outcome})'
        for name, outcome in missing.items()
      )
      raise errors.RendezvousError(
        f'Waited {deadline_seconds:g} s{purpose} for tasks that do not accept '
        f'connections: {each}. Start those tasks, look at their logs and '
        'addresses, or raise deadline_seconds.'
      )
    if now >= log_at:
      logging.warning(
        'Waiting%s for %s (%.0f s of %g s).',
        purpose,
        ', '.join(f'{name} at {tasks[name]}' for name in missing),
        now - start,
        deadline_seconds,
      )
      log_at = now + _SECONDS_BETWEEN_LOGS
    time.sleep(min(_POLL_SECONDS, ends_at - now))


@contextlib.contextmanager
def serving(task: str, address: str | None) -> Iterator[None]:
  """Context in which TensorFlow starts the server of a task.

  Raises:
    RendezvousError: the server cannot listen, mostly since its port is taken.
  """
  import tensorflow as tf

  try:
    yield
  except tf.errors.UnknownError as e:
    raise errors.RendezvousError(
      f'{task} cannot serve at {address}: {e.message}. Expected an address of '
      'this host with a free port. Fix: end the process that listens there, '
      'such as an earlier start of this task, or give this task another port.'
    ) from e


class _Probe(threading.Thread):
  """One attempt to connect; `outcome` is why it failed, empty if it did not."""

  def __init__(self, name: str, address: str, timeout: float):
    # A daemon: the look-up of a name cannot be interrupted.
    super().__init__(name=f'probe of {name}', daemon=True)
    self._address = checks.split_address(address, name)
    self._timeout = timeout
    self.outcome = f'no answer within {timeout:g} s'

  def run(self):
    try:
      socket.create_connection(self._address, self._timeout).close()
    except TimeoutError:
      return
    # UnicodeError: a name that cannot be one, such as 'a..b'.
    except (OSError, UnicodeError) as e:
      self.outcome = getattr(e, 'strerror', None) or str(e)
      return
    self.outcome = ''


def _ask(
  tasks: Mapping[str, str], timeout: float, probes: dict[str, _Probe]
) -> dict[str, str]:
  """Asks each task once; returns the outcomes of those that do not answer.

  A probe of the last call that still runs is used again: threads do not pile up.
  """
  for name, address in tasks.items():
    if name not in probes or not probes[name].is_alive():
      probes[name] = _Probe(name, address, timeout)
      probes[name].start()
  ends_at = time.monotonic() + timeout
  for name in tasks:
    probes[name].join(max(0.0, ends_at - time.monotonic()))
  found = {name: probes[name].outcome for name in tasks}
  return {name: outcome for name, outcome in found.items() if outcome}
