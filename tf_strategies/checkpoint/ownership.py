"""Says which run owns a checkpoint directory, and which process writes there.

The writer holds a lock (flock) on the file `owner.json` in the directory. The system
releases the lock when the process ends, also after kill -9. Between hosts the lock
works on a shared file system that passes locks on, as NFSv4 does; after the loss of a
host the server of such a file system releases the lock when its lease expires. Where a
file system has no locks, the newest process is the owner, and the one before it is
refused at its next save.

The file names the writer and its run. A run is everything that one launch of a job
starts, with all restarts: the launcher gives its tasks a TFS_RUN_ID. Without it each
process is a run of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

from absl import logging

from tf_strategies import errors

_FILE = 'owner.json'
# The first one that is set names the run. Slurm keeps its number when it requeues.
_VARIABLES = ('TFS_RUN_ID', 'SLURM_JOB_ID')
# An earlier start of this run may still be ending, or its host may be lost: longer
# than the lease of an NFS server.
_SAME_RUN_SECONDS = 120.0
_OTHER_RUN_SECONDS = 5.0
_POLL_SECONDS = 0.2

# A name of this process; a forked one gets another.
_of_this_process = secrets.token_hex(6)
# By directory: two locks of one process would keep each other out.
_claims: weakref.WeakValueDictionary[str, Ownership] = (
  weakref.WeakValueDictionary()
)


def of(directory: str) -> Ownership:
  """Returns this process's claim to write into a directory of checkpoints."""
  key = os.path.realpath(directory)
  claim = _claims.get(key)
  if claim is None:
    claim = _claims[key] = Ownership(directory)
  return claim


def run_id() -> str:
  """Returns the name of the run that this process is part of."""
  for name in _VARIABLES:
    if os.environ.get(name):
      return os.environ[name]
  return _of_this_process


def describe(owner: dict[str, Any]) -> str:
  """Returns a text that names the process of an owner record."""
  return (
    f'run {owner.get("run")} (process {owner.get("pid")} on '
    f'{owner.get("host")}, since {owner.get("since")})'
  )


def new_record() -> dict[str, Any]:
  """Returns a record that names this process as an owner from now on."""
  return {
    'run': run_id(),
    'host': socket.gethostname(),
    'pid': os.getpid(),
    'since': time.strftime('%Y-%m-%d %H:%M:%S'),
    'process': _of_this_process,
    'pids': _pids(),
  }


def is_of_this_process(owner: dict[str, Any]) -> bool:
  """Returns whether a record names this process."""
  return owner.get('process') == _of_this_process


def is_dead(owner: dict[str, Any]) -> bool:
  """Returns whether the process of a record, one of this host, has surely ended."""
  if not owner.get('pids') or owner['pids'] != _pids():
    return False
  try:
    os.kill(owner['pid'], 0)
  except ProcessLookupError:
    return True
  except PermissionError:
    pass
  return False


def _pids() -> str:
  """Names the space in which process ids are unique; empty where unknown."""
  try:
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as f:
      return f'{f.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


class Ownership:
  """This process's claim to write into a directory; see `of`.

  The lock ends with the object, or by `release`.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self.path = os.path.join(directory, _FILE)
    # The open file that is locked.
    self._descriptor: int | None = None
    self._close: Callable[[], object] = lambda: None

  def acquire(self) -> None:
    """Makes this process the owner; returns at once if it is.

    Raises:
      InUseError: a live process of another run owns the directory.
      TakenOverError: this process was the owner, and another one is now.
      OSError: the file cannot be written.
    """
    if self._descriptor is not None and self._is_at_path(self._descriptor):
      found = _read(self._descriptor)
      if found and not is_of_this_process(found):
        raise errors.TakenOverError(
          f'Expected this process, {os.getpid()} on {socket.gethostname()}, to '
          f'be the only writer of {self._directory}, got {describe(found)}. Fix: '
          'give each job a directory of its own.'
        )
    else:
      self.release()
      os.makedirs(self._directory, exist_ok=True)
      self._wait_for_lock()

  def release(self) -> None:
    """Lets another process be the owner, if this one is."""
    self._close()
    self._descriptor = None

  def _wait_for_lock(self) -> None:
    began = time.monotonic()
    has_told = False
    while (owner := self._try_to_lock()) is not None:
      is_same = owner.get('run') == run_id()
      patience = _SAME_RUN_SECONDS if is_same else _OTHER_RUN_SECONDS
      if time.monotonic() - began > patience:
        raise errors.InUseError(
          f'Expected one run that writes checkpoints to {self._directory}, '
          f'got {describe(owner)} too, which is alive. Fix: pass another '
          'directory, or end the other run first.'
        )
      if not has_told:
        has_told = True
        logging.warning(
          'Waiting up to %.0f s for %s, which belongs to %s.',
          patience,
          self._directory,
          describe(owner),
        )
      time.sleep(_POLL_SECONDS)

  def _try_to_lock(self) -> dict[str, Any] | None:
    """Takes the lock; returns the record of the process that has it, if any."""
    descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.ExitStack() as stack:
      stack.callback(os.close, descriptor)
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
          return _read(descriptor)
        # A file system without locks.
        logging.warning(
          '%s cannot be locked (%s): a second run that writes there is noticed '
          'only when the first one saves.',
          self.path,
          e.strerror,
        )
      if not self._is_at_path(descriptor):  # It was deleted meanwhile.
        return {}
      _write(descriptor, new_record())
      stack.pop_all()
    self._descriptor = descriptor
    self._close = weakref.finalize(self, os.close, descriptor)
    return None

  def _is_at_path(self, descriptor: int) -> bool:
    """Returns whether an open file is the one at `path`."""
    try:
      return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
    except FileNotFoundError:
      return False


def _write(descriptor: int, owner: dict[str, Any]) -> None:
  """Writes a record over the one in the owner file.

  In one call: a full disk, or the end of this process, leaves one of the two.
  """
  # JSON may end in spaces, which cover the rest of a longer record.
  size = os.fstat(descriptor).st_size
  os.pwrite(descriptor, json.dumps(owner).encode().ljust(size), 0)
  os.fsync(descriptor)


def _read(descriptor: int) -> dict[str, Any]:
  """Returns the record in an owner file; an empty one if it cannot be read."""
  text = os.pread(descriptor, 1 << 20, 0)
  with contextlib.suppress(ValueError):
    found = json.loads(text)
    if isinstance(found, dict):
      return found
  return {}


def _release_in_child() -> None:
  global _of_this_process
  _of_this_process = secrets.token_hex(6)
  # The lock belongs to the open file, of which a forked process has a copy.
  for claim in list(_claims.values()):
    claim.release()


os.register_at_fork(after_in_child=_release_in_child)
