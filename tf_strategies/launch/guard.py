"""The program beside a launcher: it ends the tasks when the launcher is gone.

  python -I -S guard.py <grace period>

The launcher cannot clean up after its own SIGKILL. So it tells this small process, by
lines on its stdin, the number of the process group of each task that it starts, and
minus that number when nothing of the group is left. When stdin ends, the launcher is
gone: groups that are left get SIGTERM, and SIGKILL after the grace period.
"""

import os
import signal
import sys
import time

_POLL_SECONDS = 0.05


def signal_group(group: int, number: int) -> bool:
  """Sends a signal to a process group; returns whether any process is left in it."""
  try:
    os.killpg(group, number)
  except (ProcessLookupError, PermissionError):
    return False
  return True


def main(grace_period: float) -> None:
  """Returns when the launcher is gone, and its tasks are."""
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  groups: set[int] = set()
  for line in sys.stdin:
    group = int(line)
    (groups.add if group > 0 else groups.discard)(abs(group))
  kill_at = time.monotonic() + grace_period
  for group in groups:
    signal_group(group, signal.SIGTERM)
  while groups and time.monotonic() < kill_at:
    time.sleep(_POLL_SECONDS)
    groups = {group for group in groups if signal_group(group, 0)}
  for group in groups:
    signal_group(group, signal.SIGKILL)


if __name__ == '__main__':
  main(float(sys.argv[1]))
