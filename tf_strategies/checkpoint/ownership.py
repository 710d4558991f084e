"""Says which run owns a checkpoint directory, and which process writes there.

The writer holds a lock (flock) on the file `owner.json` in the directory. The system
releases the lock when the process ends, also after kill -9. Between hosts the lock
works on a shared file system that passes locks on, as NFSv4 does; after the loss of a
host the server of such a file system releases the lock when its lease expires. Where a
file system has no locks, the newest process is the owner, and the one before it is
refused at its next save.

The file names the writer and all runs that have owned the directory, in order. A run
is everything that one launch of a job starts, with all restarts: the launcher gives
its tasks a TFS_RUN_ID. Without it each process is a run of its own.
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
_MOST_RUNS = 100

# A name of this process; a forked one gets another.
_of_this_process = secrets.token_hex(6)
# By directory: the locks that this process holds.
_held: weakref.WeakValueDictionary[str, _Lock] = weakref.WeakValueDictionary()


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


class _Lock:
  """The lock of a directory; ends with the object."""

  def __init__(self, descriptor: int, owner: dict[str, Any]):
    self.descriptor = descriptor
    self.owner = owner
    self.close = weakref.finalize(self, os.close, descriptor)

  def append_run(self) -> None:
    """Makes this run the newest one of the record."""
    runs = [run for run in self.owner['runs'] if run != run_id()]
    self.owner['runs'] = [*runs, run_id()][-_MOST_RUNS:]

  def write(self) -> None:
    """Writes the record over the one in the file.

    In one call: a full disk, or the end of this process, leaves one of the two.
    """
    # JSON may end in spaces, which cover the rest of a longer record.
    size = os.fstat(self.descriptor).st_size
    text = json.dumps(self.owner).encode().ljust(size)
    os.pwrite(self.descriptor, text, 0)
    os.fsync(self.descriptor)

  def is_on(self, path: str) -> bool:
    """Returns whether the file that is locked is the one at `path`."""
    try:
      return os.path.samestat(os.fstat(self.descriptor), os.stat(path))
    except FileNotFoundError:
      return False


class Ownership:
  """This process's claim to write into a directory.

  Args:
    directory: of the checkpoints.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self.path = os.path.join(directory, _FILE)
    # Kept as long as this object lives.
    self._lock: _Lock | None = None

  def acquire(self, newest: int) -> None:
    """Makes this process the owner; returns at once if it is.

    Args:
      newest: number of the newest checkpoint there, 0 if there is none.

    Raises:
      InUseError: a live process of another run owns the directory.
      TakenOverError: this process was the owner, and another one is now.
      OSError: the file cannot be written.
    """
    key = os.path.realpath(self._directory)
    lock = _held.get(key)
    if lock is not None and lock.is_on(self.path):
      self._check_is_owner(lock)
    else:
      os.makedirs(self._directory, exist_ok=True)
      lock = _held[key] = self._wait_for_lock(newest)
    self._lock = lock

  def note_write(self) -> None:
    """Notes that this run, the owner, writes a checkpoint."""
    if self._lock.owner['runs'][-1] != run_id():
      self._lock.append_run()
      self._lock.write()

  def release(self) -> None:
    """Lets another process be the owner, if this one is."""
    lock = _held.pop(os.path.realpath(self._directory), None)
    self._lock = None
    if lock is not None:
      lock.close()

  def may_continue(self, number: int) -> bool:
    """Returns whether this run may continue a checkpoint, whoever wrote it.

    It may if the user has deleted the owner file since.
    """
    return number <= self._record().get('adopted', number)

  def check_run(self, path: str, number: int, run: str) -> None:
    """Checks that no other run took over the directory from this one.

    A run that begins may continue any other run's checkpoints. A run that was here
    before may not continue checkpoints that another run has written since.

    Args:
      path: of a checkpoint.
      number: of the checkpoint.
      run: which wrote it.

    Raises:
      TakenOverError: another run took over.
    """
    mine = run_id()
    # A run that begins is the last one; it moves there again when it saves.
    runs = self._record().get('runs', [])
    is_known = mine in runs and run in runs
    if not is_known or runs.index(run) <= runs.index(mine):
      return
    if self.may_continue(number):
      return
    raise errors.TakenOverError(
      f'{path} was written by run {run}, which took over the directory from this '
      f'run, {mine}. Expected checkpoints of this run. Fix: give each job a '
      f'directory of its own. To continue the other run all the same, delete '
      f'{self.path} and start the job again.'
    )

  def _record(self) -> dict[str, Any]:
    """Returns the owner's record; an empty one without an owner file."""
    if self._lock is not None:
      return self._lock.owner
    with contextlib.suppress(OSError), open(self.path, 'rb') as file:
      return _read(file.fileno())
    return {}

  def _wait_for_lock(self, newest: int) -> _Lock:
    began = time.monotonic()
    has_told = False
    while True:
      lock, owner = self._try_to_lock(newest)
      if lock is not None:
        return lock
      is_same = owner.get('run') == run_id()
      patience = _SAME_RUN_SECONDS if is_same else _OTHER_RUN_SECONDS
      if time.monotonic() - began > patience:
        raise errors.InUseError(
          f'{self._directory} belongs to {describe(owner)}, which is alive. '
          'Expected one run that writes checkpoints there. Fix: pass another '
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

  def _try_to_lock(self, newest: int) -> tuple[_Lock | None, dict[str, Any]]:
    """Returns the lock, or None and the record of the process that has it."""
    descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.ExitStack() as stack:
      stack.callback(os.close, descriptor)
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
          return None, _read(descriptor)
        # A file system without locks.
        logging.warning(
          '%s cannot be locked (%s): a second run that writes there is noticed '
          'only when the first one saves.',
          self.path,
          e.strerror,
        )
      found = _read(descriptor)
      lock = _Lock(descriptor, found)
      if not lock.is_on(self.path):  # It was deleted meanwhile.
        lock.close.detach()
        return None, {}
      stack.pop_all()
    lock.owner = new_record()
    lock.owner['adopted'] = found.get('adopted', 0) if found else newest
    lock.owner['runs'] = found.get('runs', [])
    if run_id() not in lock.owner['runs']:
      lock.append_run()
    try:
      lock.write()
    except OSError:
      lock.close()  # The traceback would keep it.
      raise
    return lock, lock.owner

  def _check_is_owner(self, lock: _Lock) -> None:
    """Raises TakenOverError if another process has written the owner file."""
    found = _read(lock.descriptor)
    if not found or is_of_this_process(found):
      return
    raise errors.TakenOverError(
      f'{self._directory} was taken over by {describe(found)}. Expected this '
      f'process, {os.getpid()} on {socket.gethostname()}, to be its only writer. '
      'Fix: give each job a directory of its own.'
    )


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
  for lock in list(_held.values()):
    lock.close()
  _held.clear()


os.register_at_fork(after_in_child=_release_in_child)
