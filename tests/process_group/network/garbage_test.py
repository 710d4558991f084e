"""Unauthenticated peers that connect while workers train do not disturb them."""

import contextlib
import os
import socket

import numpy as np
import psutil
from absl.testing import absltest, parameterized

from tests import processes, tiers
from tests.process_group import meetings
from tf_strategies.process_group.network import connection, protocol


def _call(server):
  return connection.CALL.pack(
    b'TFSH', protocol.PROTOCOL_VERSION, 1, server, bytes(32)
  )


# Data that unauthenticated peers send: nothing, random bytes, another protocol, part of
# a request, a request with a wrong proof, and a request to a task that does not exist.
_GARBAGE = (
  b'',
  os.urandom(200),
  b'GET / HTTP/1.1\r\nHost: worker-0\r\n\r\n',
  _call(0)[:10],
  _call(0) + bytes(connection.PROOF_BYTES),
  _call(9),
  protocol.pack(protocol.Kind.FAILED, {}),
  b'\xff' * 100_000,
)


def _train(rank, directory):
  """Trains until the test ends it. Returns steps, memory growth, threads and files."""
  process = psutil.Process()
  with meetings.meet(rank) as meeting, meeting.form() as group:
    steps, before = 0, None
    while True:
      assert (group.all_reduce(np.full(1000, group.rank + 1.0)) == 3).all()
      steps += 1
      if steps == 500:
        before = process.memory_info().rss
        meetings.touch(directory, f'{rank}.runs')
      stop = os.path.exists(os.path.join(directory, 'stop'))
      if group.all_reduce(np.array([int(stop)]))[0] == 2:
        group.barrier()
        grown = process.memory_info().rss - before
        return steps, grown, process.num_threads(), process.num_fds()


def _send(address, garbage, linger):
  """Opens a connection, sends `garbage`, and appends the socket to `linger`."""
  host, port = address.split(':')
  sock = socket.create_connection((host, int(port)), timeout=20)
  linger.append(sock)
  # The peer may close the connection while data is sent.
  with contextlib.suppress(OSError):
    sock.sendall(garbage)
  if len(linger) > 200:
    linger.pop(0).close()


class GarbageTest(parameterized.TestCase):
  @tiers.parameters(500, tiers.soak(10_000))
  def test_training_continues(self, count):
    directory = self.create_tempdir().full_path
    with processes.Workers(
      _train, 2, args=(directory,), deadline=600
    ) as workers:
      meetings.wait_for(directory, '0.runs', '1.runs')
      linger = []
      for i in range(count):
        address = workers.addresses[i % 2]
        _send(address, _GARBAGE[i // 2 % len(_GARBAGE)], linger)
      meetings.touch(directory, 'stop')
      outcomes = workers.wait()
      for sock in linger:
        sock.close()
    for outcome in outcomes:
      self.assertEqual(outcome.error_text, '')
      self.assertEqual(outcome.exitcode, 0)
      steps, grown, threads, files = outcome.value
      self.assertGreater(steps, 500)
      self.assertLess(grown, 20 << 20)
      self.assertLess(threads, 20)
      # The number of unauthenticated peers at a time is limited.
      self.assertLess(files, 200)


if __name__ == '__main__':
  absltest.main()
