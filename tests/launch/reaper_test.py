"""The reaper alone, as the launcher starts it."""

import signal
import socket
import sys

from absl.testing import absltest, parameterized

from benchmarks import processes
from tests.launch import programs
from tf_strategies.launch import reaper

_PARENT_AND_CHILD = f"""exec {sys.executable} -I -S -c '
import os, signal, time
child = os.fork()
def end(number, frame):
  if child:
    os.waitpid(child, 0)
  os.write(1, b"parent\\n" if child else b"child\\n")
  os._exit(5)
signal.signal({{number}}, end)
os.write(1, b"ready\\n")
while True:
  time.sleep(1)
'"""


class _Reaped:
  """A shell under a reaper, and the launcher's end of the channel."""

  def __init__(self, script):
    self.channel, theirs = socket.socketpair()
    # A socket, unlike a pipe, is read with a deadline.
    self._output, written = socket.socketpair()
    for end in (self.channel, self._output):
      end.settimeout(programs.DEADLINE_SECONDS)
    with theirs, written:
      self.process = processes.Command(
        [sys.executable, '-I', '-S', reaper.__file__, str(theirs.fileno()),
         '30', '--', 'sh', '-c', script],
        deadline_seconds=programs.DEADLINE_SECONDS,
        pass_fds=[theirs.fileno()],
        stdout=written,
        start_new_session=True,
      )  # fmt: skip
    self.reports = self.channel.makefile('rb')
    self.output = self._output.makefile('rb')

  def status(self):
    """Waits for the report; returns the status in it."""
    status, at = self.reports.read().split()
    assert int(at) > 0
    return int(status)

  def close(self):
    for end in (self.reports, self.channel, self.output, self._output):
      end.close()


class GuardTest(parameterized.TestCase):
  def _start(self, script):
    reaped = _Reaped(script)
    self.addCleanup(reaped.process.close)
    self.addCleanup(reaped.close)
    return reaped

  def test_signals_the_whole_group(self):
    number = int(signal.SIGINT)
    reaped = self._start(_PARENT_AND_CHILD.format(number=number))
    for _ in range(2):
      line = reaped.output.readline()
      # At its end, the report says why.
      self.assertEqual(line, b'ready\n', line or reaped.reports.read())
    reaped.channel.send(bytes([number]))
    self.assertEqual(reaped.status(), 5)
    self.assertEqual(reaped.output.read(), b'child\nparent\n')


class DescendantsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({2: 1, 3: 2, 4: 3, 9: 8}, 1, [2, 3, 4]),
    # A pid may be used again while /proc is read: no cycle may trap it.
    ({2: 3, 3: 2, 4: 2}, 2, [3, 4]),
  )
  def test_finds_all_below(self, parents, ancestor, expected):
    self.assertEqual(reaper.descendants(parents, ancestor), expected)


if __name__ == '__main__':
  absltest.main()
