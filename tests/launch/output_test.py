import errno
import io
import os
import select
from unittest import mock

import hypothesis
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tf_strategies.launch import output


def _collector(log=None):
  written = []
  return written, output.TaskOutput(b'[a] ', written.append, log)


class TaskOutputTest(parameterized.TestCase):
  @hypothesis.given(
    st.lists(
      st.binary(max_size=20) | st.sampled_from([b'\n', b'\r', b'x\r']),
      max_size=20,
    )
  )
  def test_lines_do_not_depend_on_the_pieces(self, pieces):
    written, lines = _collector()
    for piece in pieces:
      lines.feed(piece)
    lines.close()
    text = b''.join(pieces)
    expected = text.split(b'\n')
    if not expected[-1]:
      expected.pop()
    # An overwritten line shows its last text.
    expected = [e.rstrip(b'\r').rpartition(b'\r')[2] for e in expected]
    self.assertEqual(written, [b'[a] ' + line + b'\n' for line in expected])
    expected_tail = [e for e in expected if e.strip(b' ^~')]
    self.assertEqual(lines.tail(), expected_tail[-output.TAIL_LINES :])

  def test_progress_is_shown_periodically(self):
    with mock.patch.object(output.time, 'monotonic', return_value=0) as now:
      written, lines = _collector()
      for second in range(25):
        now.return_value = second
        lines.feed(b'\rstep %d' % second)
    lines.feed(b'\rstep 25\n')
    self.assertEqual(
      written, [b'[a] step 11\n', b'[a] step 22\n', b'[a] step 25\n']
    )

  def test_line_without_end_does_not_fill_memory(self):
    written, lines = _collector()
    for _ in range(10):
      lines.feed(b'x' * (1 << 20))
    self.assertLen(written, 1)
    lines.close()
    self.assertLen(written, 2)
    total = sum(len(w) - len(b'[a] \n') for w in written)
    self.assertEqual(total, 10 << 20)
    self.assertLess(max(map(len, lines.tail())), 2100)

  def test_tracebacks_are_hidden_if_requested(self):
    log = io.BytesIO()
    written, lines = _collector(log)
    traceback = b'Traceback (most recent call last):\n  File "x"\nE: why\n'
    lines.feed(traceback)
    self.assertLen(written, 3)
    lines.hides_tracebacks = True
    lines.feed(b'saved\n' + traceback)
    self.assertEqual(written[3:], [b'[a] saved\n'])
    self.assertEqual(lines.tail()[-1], b'E: why')
    self.assertEqual(log.getvalue(), traceback + b'saved\n' + traceback)

  def test_tensorflow_notices_are_hidden_if_requested(self):
    notices = (
      b'WARNING: All log messages before absl::InitializeLog() is called are '
      b'written to STDERR\n'
      b'I0000 00:00:1795529721.680094   30825 port.cc:153] oneDNN custom ...\n'
    )
    rest = b'W0000 00:00:1795529721.680094   30825 a.cc:1] a warning\nI0000 x\n'
    for is_hidden in (False, True):
      written, lines = _collector()
      lines.begin(hides_notices=is_hidden)
      lines.feed(notices + rest)
      self.assertLen(written, 2 if is_hidden else 4)
      self.assertLen(lines.tail(), len(written))

  def test_full_disk_ends_only_the_log(self):
    class Full(io.BytesIO):
      def write(self, data):
        raise OSError(errno.ENOSPC, 'No space left')

    written, lines = _collector(Full())
    lines.feed(b'one\n')
    lines.feed(b'two\n')
    first, *rest = written
    self.assertIn(b'[a] (no more log: [Errno 28] No space left', first)
    self.assertEqual(rest, [b'[a] one\n', b'[a] two\n'])


class SinkTest(absltest.TestCase):
  def test_full_pipe_does_not_block_or_lose_data(self):
    read_end, write_end = os.pipe()
    self.addCleanup(os.close, read_end)
    self.addCleanup(os.close, write_end)
    sink = output.OutputQueue(write_end)
    expected = b''.join(b'%d,' % i for i in range(100_000))
    for start in range(0, len(expected), 50_000):
      sink.write(expected[start : start + 50_000])
    self.assertEqual(sink.pending, len(expected))
    poller = select.poll()
    poller.register(sink.fd, select.POLLOUT)
    found = b''
    while len(found) < len(expected):
      while sink.pending and poller.poll(0):
        sink.flush_some()
      found += os.read(read_end, 1 << 16)
    self.assertTrue(found == expected)
    self.assertEqual(sink.pending, 0)


if __name__ == '__main__':
  absltest.main()
