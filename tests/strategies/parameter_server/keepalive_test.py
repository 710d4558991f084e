"""Silent tasks, with real sockets and stopped processes on this machine."""

import multiprocessing
import signal
import socket
import threading
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from tests import processes
from tf_strategies.strategies.parameter_server import keepalive

_DEADLINE_SECONDS = 30.0
_TIMEOUT = 1.0


def _listen(answer: bytes | None = b'settings'):
  """Returns a listener that sends `answer` to each connection, or nothing if None."""
  listener = socket.create_server(('127.0.0.1', 0))
  if answer is not None:
    threading.Thread(
      target=_answer_all, args=(listener, answer), daemon=True
    ).start()
  return listener


def _answer_all(listener, answer):
  kept = []
  while True:
    try:
      connection, _ = listener.accept()
    except OSError:
      return
    connection.sendall(answer)
    if answer:
      kept.append(connection)
    else:
      connection.close()


def _address(listener):
  return f'127.0.0.1:{listener.getsockname()[1]}'


def _serve(connection):
  listener = _listen()
  connection.send(_address(listener))
  time.sleep(4 * _DEADLINE_SECONDS)


class AskTest(parameterized.TestCase):
  def ask(self, listener):
    self.addCleanup(listener.close)
    return keepalive.ask(_address(listener), 0.5)

  def test_answer_by_type_of_listener(self):
    self.assertEqual(self.ask(_listen()), keepalive.Answer.HELLO)
    self.assertEqual(self.ask(_listen(b'')), keepalive.Answer.REFUSED)
    # The kernel accepts the connection, but no process answers.
    self.assertEqual(self.ask(_listen(None)), keepalive.Answer.NOTHING)
    closed = _listen(None)
    address = _address(closed)
    closed.close()
    self.assertEqual(keepalive.ask(address, 0.5), keepalive.Answer.REFUSED)

  def test_all_tasks_are_asked_in_parallel(self):
    silent = [_listen(None) for _ in range(20)]
    for listener in silent:
      self.addCleanup(listener.close)
    answering = _listen()
    self.addCleanup(answering.close)
    addresses = {('worker', i): _address(m) for i, m in enumerate(silent)}
    began = time.monotonic()
    answers = keepalive.ask_all(
      {**addresses, 'answering': _address(answering)}, 0.5
    )
    self.assertLess(time.monotonic() - began, 20 * 0.5 / 2)
    self.assertEqual(answers.pop('answering'), keepalive.Answer.HELLO)
    self.assertEqual(
      answers, dict.fromkeys(addresses, keepalive.Answer.NOTHING)
    )

  def test_probes_are_not_disconnected(self):
    """Checks that `disconnect` spares probes: a closed one looks like a refusal."""
    listener = _listen(None)
    peers = keepalive.peers_of(_address(listener))
    is_over = threading.Event()

    def disconnect():
      while not is_over.wait(0.01):
        keepalive.disconnect(peers)

    thread = threading.Thread(target=disconnect)
    thread.start()
    try:
      self.assertEqual(self.ask(listener), keepalive.Answer.NOTHING)
    finally:
      is_over.set()
      thread.join()


class KeepaliveTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addresses = {}
    self.tasks = self.enter_context(processes.ProcessGroup())
    for task in [('worker', 0), ('worker', 1)]:
      receiver, sender = multiprocessing.Pipe(duplex=False)
      self.tasks.start_function(task, _serve, (sender,))
      if not receiver.poll(_DEADLINE_SECONDS):
        self.fail(f'{task} did not start')
      # Uses a name: connections must be found by its IP address.
      self.addresses[task] = receiver.recv().replace('127.0.0.1', 'localhost')

  def connect(self, task):
    host, _, port = self.addresses[task].partition(':')
    connection = socket.create_connection((host, int(port)), _DEADLINE_SECONDS)
    self.addCleanup(connection.close)
    self.assertEqual(connection.recv(8), b'settings')
    return connection

  def watch(self, seconds=_TIMEOUT):
    watch = keepalive.Keepalive(self.addresses, seconds)
    self.addCleanup(watch.close)
    return watch

  def assert_is_open(self, connection):
    connection.settimeout(0.1)
    with self.assertRaises(TimeoutError):
      connection.recv(1)

  def test_stopped_task_is_disconnected_until_reset(self):
    stopped, other = self.addresses
    watch = self.watch()
    connection, others = self.connect(stopped), self.connect(other)
    with self.assertLogs('absl', 'WARNING') as logs:
      self.tasks.signal(*stopped, signal.SIGSTOP)
      # Only a shutdown ends this call.
      self.assertEqual(connection.recv(1), b'')
      processes.wait_until(lambda: watch.is_disconnected(stopped))
    self.assertIn(f'worker 0 at {self.addresses[stopped]}', logs.output[0])
    self.assertFalse(watch.is_disconnected(other))
    self.tasks.signal(*stopped, signal.SIGCONT)
    answers = keepalive.ask_all(self.addresses)
    self.assertEqual(set(answers.values()), {keepalive.Answer.HELLO})
    # Its earlier requests are lost nevertheless.
    self.assertTrue(watch.is_disconnected(stopped))
    watch.reset()
    again = self.connect(stopped)
    time.sleep(2 * _TIMEOUT)
    self.assertFalse(watch.is_disconnected(stopped))
    self.assert_is_open(again)
    self.assert_is_open(others)

  @mock.patch.object(keepalive, '_FORGIVEN_SECONDS', 4 * _TIMEOUT)
  @pytest.mark.soak
  def test_answering_task_is_reconnected_after_a_delay(self):
    stopped, other = self.addresses
    watch = self.watch()
    for task in (stopped, other):
      self.tasks.signal(*task, signal.SIGSTOP)
      processes.wait_until(lambda task=task: watch.is_disconnected(task))
    self.tasks.signal(*stopped, signal.SIGCONT)
    continued_at = time.monotonic()
    processes.wait_until(lambda: not watch.is_disconnected(stopped))
    # Counted from the last disconnect, not from the first.
    self.assertGreater(time.monotonic() - continued_at, 3 * _TIMEOUT)
    self.assertTrue(watch.is_disconnected(other))

  def test_short_silence_is_ignored(self):
    stopped, _ = self.addresses
    watch = self.watch(_DEADLINE_SECONDS)
    connection = self.connect(stopped)
    self.tasks.signal(*stopped, signal.SIGSTOP)
    time.sleep(_TIMEOUT)
    self.tasks.signal(*stopped, signal.SIGCONT)
    self.assertFalse(watch.is_disconnected(stopped))
    self.assert_is_open(connection)


if __name__ == '__main__':
  absltest.main()
