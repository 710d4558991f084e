"""Counts the bytes that parameter servers and workers send.

A task gets a tensor by asking for it the task that has it. So what a server sends
are rows that workers read; what a worker sends are gradients that servers ask for,
and what steps report. The relays are in the test's process: TensorFlow connects
with Python's lock held.
"""

import contextlib
import json
import socket
import threading

from tests import parameter_servers


class CountedJob(parameter_servers.Job):
  """A job whose tasks reach servers and workers through relays."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._lock = threading.Lock()
    self._sent = {'ps': 0, 'worker': 0}
    self._relayed = dict(self.cluster)
    for job in self._sent:
      self._relayed[job] = [
        _listen(self._relay, address, job) for address in self.cluster[job]
      ]
    # Of what tells the chief.
    self.counts_address = _listen(self._tell)

  def tf_config(self, job, index):
    """As of any job, with relays in place of tasks."""
    cluster, self.cluster = self.cluster, self._relayed
    try:
      return super().tf_config(job, index)
    finally:
      self.cluster = cluster

  def _tell(self, near):
    with self._lock, near:
      near.sendall(json.dumps(self._sent).encode())

  def _relay(self, near, address, job):
    try:
      far = socket.create_connection(_parsed(address))
    except ConnectionRefusedError:  # The task has not begun to listen.
      near.close()
      return
    for each in (near, far):
      each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _start(self._forward, near, far, None)
    _start(self._forward, far, near, job)

  def _forward(self, source, target, sender):
    with contextlib.suppress(OSError):  # One of them has closed.
      while data := source.recv(1 << 18):
        if sender is not None:
          with self._lock:
            self._sent[sender] += len(data)
        target.sendall(data)
    for each in (source, target):
      with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


def sent(address: str) -> tuple[int, int]:
  """Bytes that workers and servers have sent; `address` is of the job's counts."""
  with socket.create_connection(_parsed(address)) as connection:
    found = json.loads(connection.makefile().read())
  return found['worker'], found['ps']


def _parsed(address):
  host, _, port = address.rpartition(':')
  return host, int(port)


def _listen(serve, *args) -> str:
  """Calls `serve(connection, *args)` for each one; returns the address."""
  listener = socket.create_server(('127.0.0.1', 0))

  def accept():
    while True:
      connection, _ = listener.accept()
      serve(connection, *args)

  _start(accept)
  return f'127.0.0.1:{listener.getsockname()[1]}'


def _start(function, *args):
  threading.Thread(target=function, args=args, daemon=True).start()
