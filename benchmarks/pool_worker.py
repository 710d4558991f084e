"""A process of a pool, which connects to the pool's socket and runs its commands.

  python -m benchmarks.pool_worker <socket> <module:Class> <rank>

It imports only the standard library, so that a worker can run in an environment
with torch and without TensorFlow.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Sequence

# Exit status of a worker after its pool has closed the connection.
_ABANDONED_STATUS = 3


def _read(connection: socket.socket, commands: queue.SimpleQueue) -> None:
  """Reads commands, and ends the process when the connection closes.

  It runs in its own thread, because the main thread may hang in a collective after
  another worker has been killed.
  """
  with connection.makefile('rb') as lines:
    try:
      for line in lines:
        commands.put(json.loads(line))
    except OSError:
      pass  # The pool was killed.
  os._exit(_ABANDONED_STATUS)


def _answer(actor: object, command: dict) -> dict:
  try:
    method = getattr(actor, command['method'])
    return {'value': method(**command['arguments'])}
  except Exception:
    return {'error': traceback.format_exc()}


def main(argv: Sequence[str]) -> None:
  """Runs commands until the pool closes the connection.

  Args:
    argv: the program's name, the path of the pool's Unix socket, the actor as
      'module:Class', and the rank or 'any'.
  """
  path, name, rank_text = argv[1:]
  rank = None if rank_text == 'any' else int(rank_text)
  connection = socket.socket(socket.AF_UNIX)
  connection.connect(path)
  _send(connection, {'rank': rank})
  commands: queue.SimpleQueue = queue.SimpleQueue()
  threading.Thread(
    target=_read, args=(connection, commands), name='pool', daemon=True
  ).start()
  actor = None
  while True:
    command = commands.get()
    try:
      if actor is None:
        module, _, class_name = name.partition(':')
        actor = getattr(importlib.import_module(module), class_name)(rank)
    except Exception:
      _send(connection, {'error': traceback.format_exc()})
      continue
    _send(connection, _answer(actor, command))


def _send(connection: socket.socket, message: dict) -> None:
  connection.sendall(json.dumps(message).encode() + b'\n')


if __name__ == '__main__':
  main(sys.argv)
