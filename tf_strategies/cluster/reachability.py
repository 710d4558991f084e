"""Which tasks of a job accept connections, and waiting until all of them do."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from absl import logging

from tf_strategies import errors, option_checks
from tf_strategies.cluster import checks

_POLL_SECONDS = 0.2
# For all answers, with the look-up of names.
_PROBE_SECONDS = 1.0
_SECONDS_BETWEEN_LOGS = 5.0


def unreachable(tasks: Mapping[str, str]) -> dict[str, str]:
  """Returns why tasks do not accept a TCP connection, as the system says it.

  Args:
    tasks: 'host:port' of each by its name, such as 'worker 1'.

  Example:

    >>> list(unreachable({'worker 1': 'no-such-host.invalid:2222'}))
    ['worker 1']
  """
  places = {n: checks.split_address(a, n) for n, a in tasks.items()}
  silence = f'no answer within {_PROBE_SECONDS:g} s'

  def ask(name: str) -> str:
    try:
      socket.create_connection(places[name], _PROBE_SECONDS).close()
    except TimeoutError:
      return silence
    # UnicodeError: a name that cannot be one, such as 'a..b'.
    except (OSError, UnicodeError) as e:
      return getattr(e, 'strerror', None) or str(e)
    return ''

  outcomes = concurrently(ask, tasks, silence, _PROBE_SECONDS)
  return {name: why for name, why in outcomes.items() if why}


def concurrently(
  function: Callable[[Hashable], Any],
  keys: Iterable[Hashable],
  default: Any,
  seconds: float,
) -> dict[Hashable, Any]:
  """Calls a function for each key in a thread of its own, for so long at most.

  The process does not wait for its threads at its end, as it does for those of
  `concurrent.futures`: the look-up of a name, for one, cannot be interrupted. A call that has not returned in time counts as `default`.
  """
  found = dict.fromkeys(keys, default)

  def call(key):
    found[key] = function(key)

  threads = [
    threading.Thread(target=call, args=(key,), daemon=True) for key in found
  ]
  for thread in threads:
    thread.start()
  ends_at = time.monotonic() + seconds
  for thread in threads:
    thread.join(max(0.0, ends_at - time.monotonic()))
  return dict(found)


def wait_for_tasks(
  tasks: Mapping[str, str], deadline_seconds: float, what_for: str
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
  start = log_at = time.monotonic()
  missing = dict(tasks)
  while outcomes := unreachable(missing):
    missing = {name: tasks[name] for name in outcomes}
    now = time.monotonic()
    shown = [f'{name} at {address}' for name, address in missing.items()]
    if now >= start + deadline_seconds:
      each = ', '.join(
        f'{task} ({why})'
        for task, why in zip(shown, outcomes.values(), strict=True)
      )
      raise errors.RendezvousError(
        f'Expected connections within {deadline_seconds:g} s {what_for}, got '
        f'none to {each}. Fix: start those tasks, look at their logs and '
        'addresses, or raise deadline_seconds.'
      )
    if now >= log_at:
      logging.warning(
        'Waiting %s for %s (%.0f s of %g s).',
        what_for,
        ', '.join(shown),
        now - start,
        deadline_seconds,
      )
      log_at = now + _SECONDS_BETWEEN_LOGS
    time.sleep(_POLL_SECONDS)


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
      f'Expected a free port of this host for {task}, got {address}: '
      f'{e.message}. Fix: end the process that listens there, such as an '
      'earlier start of this task, or give this task another port.'
    ) from e
