"""The program around one task: when it ends, nothing of the task is left.

  python -I -S reaper.py <channel> <grace period> -- <command>

The launcher cannot clean up after its own SIGKILL, so each task has a reaper: a
small process that imports nothing of ours and starts in milliseconds.

- `channel` is one end of a socket pair. Each byte that arrives is the number of
  a signal for the task's process group. After the grace period the group gets
  SIGKILL. When the channel closes, the launcher is gone: that counts as SIGTERM.
- The reaper reports `<status> <monotonic ns>` when the task has ended.
- On Linux it adopts the task's orphans (PR_SET_CHILD_SUBREAPER), also those
  that left the process group, and ends them when the task has ended.
- If it is killed, the task is too (PR_SET_PDEATHSIG). A `preexec_fn` is safe
  here, as the reaper has no threads; the launcher might.

Example:

  >>> from tf_strategies.launch import reaper
  >>> reaper.descendants(parents={5: 4, 6: 5, 7: 1, 8: 6}, ancestor=4)
  [5, 6, 8]
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == 'linux'
_POLL_SECONDS = 0.05
# A process that outlives SIGKILL for so long hangs in the kernel.
_GIVE_UP_SECONDS = 10.0
# Loaded here: between fork and exec nothing should be loaded.
_LIBC = ctypes.CDLL(None) if _IS_LINUX else None


class Inbox:
  """From here on, in the main thread, some signals only arrive in a pipe.

  SIGHUP is left alone where it is ignored: that is what `nohup` asks for.
  """

  def __init__(self, numbers):
    self._read_end, write_end = os.pipe()
    for end in (self._read_end, write_end):
      os.set_blocking(end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    self._numbers = [
      n
      for n in numbers
      if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN
    ]
    for number in self._numbers:
      # The wakeup pipe is the message; the handler is there because
      # Python fills the pipe for handled signals only.
      signal.signal(number, lambda *_: None)

  def fileno(self):
    """Returns a descriptor that is readable when a signal has arrived."""
    return self._read_end

  def read(self):
    """Returns the signals since the last call, in their order."""
    try:
      return [n for n in os.read(self._read_end, 512) if n in self._numbers]
    except BlockingIOError:
      return []


def adopt_orphans():
  """Makes orphans below this process its children, where Linux can do that."""
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option, value):
  if _IS_LINUX:
    _LIBC.prctl(option, value, 0, 0, 0)


def parents_of_all():
  """Returns the parent of each live process by pid; empty without /proc."""
  parents = {}
  pids = filter(str.isdigit, os.listdir('/proc')) if _IS_LINUX else ()
  for pid in pids:
    try:
      with open(f'/proc/{pid}/stat', 'rb') as f:
        stat = f.read()
    except OSError:
      continue
    # The name of the program, in parentheses, may hold anything.
    state, parent = stat[stat.rindex(b')') + 2 :].split()[:2]
    if state not in (b'Z', b'X'):
      parents[int(pid)] = int(parent)
  return parents


def descendants(parents, ancestor):
  """Returns the pids below `ancestor`, itself excluded, in ascending order."""
  found, more = set(), {ancestor}
  while more:
    found |= more
    more = {pid for pid, parent in parents.items() if parent in found} - found
  return sorted(found - {ancestor})


def signal_below(ancestor, number):
  """Sends a signal to all processes below `ancestor`, where there is a /proc."""
  for pid in descendants(parents_of_all(), ancestor):
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.kill(pid, number)


class Reaper:
  """Runs the command and reports on it; arguments as on the command line."""

  def __init__(self, channel, grace_period, command):
    self._channel = channel
    self._grace_period = grace_period
    self._command = command
    self._pid = os.getpid()
    self._group = None
    self._is_running = False
    self._kill_at = self._give_up_at = math.inf

  def run(self):
    """Returns when neither the task nor anything below it is left."""
    os.set_inheritable(self._channel, False)
    adopt_orphans()
    # Handlers that do nothing: in the task, whose program is executed, these signals
    # have their default actions again.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
      signal.signal(number, lambda *_: None)
    self._inbox = Inbox([signal.SIGCHLD, signal.SIGTERM])
    self._watched = [self._inbox, self._channel]
    if not self._start():
      return
    while self._reap() or self._is_group_left():
      self._wait()
      if time.monotonic() >= self._kill_at:
        self._kill()
      if time.monotonic() >= self._give_up_at:
        print('A process outlives SIGKILL; it hangs in the kernel.')
        return

  def _start(self):
    try:
      process = subprocess.Popen(
        self._command, preexec_fn=self._become_task, stdin=subprocess.DEVNULL
      )
    except (OSError, subprocess.SubprocessError) as e:
      print(f'cannot start {self._command[0]!r}: {e}', file=sys.stderr)
      # As a shell says of a command that it cannot find, or cannot run.
      self._report(127 if isinstance(e, FileNotFoundError) else 126)
      return False
    # It is reaped here, with the orphans; Popen must not look for it.
    process.returncode = 0
    self._group = process.pid
    self._is_running = True
    return True

  def _become_task(self):
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != self._pid:
      os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

  def _report(self, status):
    with contextlib.suppress(OSError):  # The launcher may be gone.
      os.write(self._channel, f'{status} {time.monotonic_ns()}'.encode())

  def _wait(self):
    timeout = None if self._kill_at == math.inf else _POLL_SECONDS
    ready, _, _ = select.select(self._watched, [], [], timeout)
    if signal.SIGTERM in self._inbox.read():
      self._end_softly(signal.SIGTERM)
    if self._channel in ready:
      self._obey()

  def _obey(self):
    try:
      numbers = os.read(self._channel, 512)
    except OSError:
      numbers = b''
    if not numbers:
      self._watched.remove(self._channel)
      numbers = bytes([signal.SIGTERM])
    for number in numbers:
      if number == signal.SIGKILL:
        self._kill()
      else:
        self._end_softly(number)

  def _reap(self):
    """Returns whether there are children; orphans are, once their parent is gone."""
    while True:
      try:
        pid, status = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:
        return False
      if not pid:
        return True
      if pid == self._group and self._is_running:
        self._is_running = False
        self._report(os.waitstatus_to_exitcode(status))
        self._end_softly(signal.SIGTERM)

  def _end_softly(self, number):
    if self._is_running:
      self._signal_group(number)
    else:
      self._signal_others(number)
    at = time.monotonic() + self._grace_period
    self._kill_at = min(at, self._kill_at)

  def _kill(self):
    if self._is_running:
      self._signal_group(signal.SIGKILL)
    self._signal_others(signal.SIGKILL)
    now = time.monotonic()
    # Again soon: while one is killed another may fork.
    self._kill_at = now + _POLL_SECONDS
    self._give_up_at = min(self._give_up_at, now + _GIVE_UP_SECONDS)

  def _signal_group(self, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._group, number)

  def _signal_others(self, number):
    if not _IS_LINUX:
      self._signal_group(number)
    signal_below(self._pid, number)

  def _is_group_left(self):
    """Returns whether orphans that nobody adopts here are left in the group."""
    if _IS_LINUX:
      return False
    try:
      os.killpg(self._group, 0)
    except (ProcessLookupError, PermissionError):
      return False
    return True


if __name__ == '__main__':
  _, channel, grace_period, _, *command = sys.argv
  Reaper(int(channel), float(grace_period), command).run()
