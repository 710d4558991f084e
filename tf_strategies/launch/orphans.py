"""The last resort: processes whose reaper was killed.

Example:

  >>> from tf_strategies.launch import orphans
  >>> import os, psutil
  >>> orphans.kill(keep={child.pid for child in psutil.Process().children()})
  0
"""

import ctypes
import os
import sys
from collections.abc import Set as AbstractSet

_PR_SET_CHILD_SUBREAPER = 36
_WAIT_SECONDS = 5.0


def adopt() -> None:
  """Makes orphans below this process its children, where Linux can do that."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill(keep: AbstractSet[int]) -> int:
  """Kills this process's children and all below them.

  Args:
    keep: pids of the children that are let live, with all below them.

  Returns:
    How many were killed.
  """
  import psutil

  killed = 0
  # What is killed here may leave children, which are adopted in turn.
  for _ in range(100):
    found = [
      process
      for child in psutil.Process(os.getpid()).children()
      if child.pid not in keep
      for process in (child, *_below(child))
    ]
    if not found:
      break
    for process in found:
      try:
        process.kill()
      except psutil.NoSuchProcess:
        continue
      killed += 1
    _, alive = psutil.wait_procs(found, timeout=_WAIT_SECONDS)
    if alive:
      break
  return killed


def _below(process) -> list:
  import psutil

  try:
    return process.children(recursive=True)
  except psutil.NoSuchProcess:
    return []
