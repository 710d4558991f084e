"""Decides which chief drives the parameter servers: the one that connected last.

Each chief adds a record of itself to a file in the memory of server 0, in TensorFlow's
`ram://` file system, and then watches the file. A chief that finds a newer one begins
no further steps, adds that it has left, and ends with an error. The newer one waits for
that: steps of two chiefs on one worker would wait for each other.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import tensorflow as tf
from absl import logging

from tf_strategies import _tf_internal, errors
from tf_strategies.checkpoint import ownership

_FILE = 'ram://tf_strategies/chiefs'
_SERVER = '/job:ps/replica:0/task:0/device:CPU:0'
# Several times what an older chief takes to notice; it may be cut off, or dead.
_LEAVE_SECONDS = 15.0
_POLL_SECONDS = 0.2


class Lease:
  """This process's claim to the servers that it is connected to."""

  def __init__(self):
    self._record = ownership.new_record()

  def take(self) -> None:
    """Makes this process the one that drives the servers."""
    records = _read()
    older = _newest(records)
    self._add(self._record)
    if (
      older is None
      or ownership.is_of_this_process(older)
      or ownership.is_dead(older)
    ):
      return
    logging.warning(
      'The parameter servers belonged to %s. Waiting up to %.0f s until it has left.',
      ownership.describe(older),
      _LEAVE_SECONDS,
    )
    ends_at = time.monotonic() + _LEAVE_SECONDS
    while time.monotonic() < ends_at:
      # Not what that process has left before.
      if {'left': older['process']} in _read()[len(records) :]:
        return
      time.sleep(_POLL_SECONDS)

  def check(self) -> None:
    """Checks that no newer chief is connected.

    Raises:
      TakenOverError: there is one.
      tf.errors.OpError: server 0 cannot tell.
    """
    newest = _newest(_read())
    if newest is None:  # The server was restarted.
      self._add(self._record)
    elif not ownership.is_of_this_process(newest):
      raise errors.TakenOverError(
        f'Expected one chief, got {ownership.describe(newest)}, which has '
        'taken over the parameter servers. Fix: start one chief for each '
        'job; nothing is to be done if a scheduler has replaced this one.'
      )

  def leave(self) -> None:
    """Tells a newer chief that this one begins no further steps."""
    with contextlib.suppress(tf.errors.OpError):
      self._add({'left': self._record['process']})

  def _add(self, record: dict[str, Any]) -> None:
    with _tf_internal.on_task(
      _SERVER, _FILE, json.dumps(record) + '\n'
    ) as args:
      # Files of this file system grow when they are written again.
      tf.raw_ops.WriteFile(filename=args[0], contents=args[1])


def _read() -> list[dict[str, Any]]:
  """Returns all records, oldest first."""
  try:
    with _tf_internal.on_task(_SERVER, _FILE) as args:
      text = tf.raw_ops.ReadFile(filename=args[0]).numpy().decode()
  except tf.errors.NotFoundError:
    return []
  return [json.loads(line) for line in text.splitlines()]


def _newest(records: list[dict[str, Any]]) -> dict[str, Any] | None:
  """Returns the record of the newest chief, None if it has left."""
  newest = None
  for record in records:
    if 'left' not in record:
      newest = record
    elif newest is not None and record['left'] == newest['process']:
      newest = None
  return newest
