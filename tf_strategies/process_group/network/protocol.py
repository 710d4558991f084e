"""The wire format of the control plane: frames, each with one JSON value.

Lengths are checked against limits before anything is allocated.
"""

import enum
import json
import struct
from typing import Any

PROTOCOL_VERSION = 10

MAX_PAYLOAD_BYTES = 1 << 20

_HEADER = struct.Struct('!4sBBI')
_MAGIC = b'TFSC'
HEADER_BYTES = _HEADER.size


class ProtocolError(Exception):
  """Bytes that do not follow this protocol; internal."""


class Kind(enum.IntEnum):
  """The kinds of frames of the control plane."""

  # Rendezvous.
  HELLO = 1
  PROPOSE = 2
  ACCEPT = 3
  REJECT = 4
  MESH = 5
  JOIN = 6
  READY = 7
  COMMIT = 8
  # A running group.
  HEARTBEAT = 16
  EXCHANGE = 17
  RESULT = 18
  REPORT = 20
  FAILED = 21
  GOODBYE = 24
  # Launchers of several hosts.
  NODE = 32
  JOB = 33
  EVENT = 34


def pack(kind: Kind, message: Any) -> bytes:
  """Returns a frame: its header, and the message as JSON."""
  payload = json.dumps(message).encode('utf-8')
  return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, len(payload)) + payload


def unpack_header(header: bytes, max_payload: int) -> tuple[Kind, int]:
  """Returns the kind of a frame and the length of its payload.

  Raises:
    ProtocolError: the bytes are no header, or announce more than `max_payload`.
  """
  magic, version, kind, payload = _HEADER.unpack(header)
  if magic != _MAGIC or version != PROTOCOL_VERSION:
    raise ProtocolError(f'a frame begins with {bytes(header[:5])!r}')
  if payload > max_payload:
    raise ProtocolError(f'a frame announces {payload} bytes')
  try:
    return Kind(kind), payload
  except ValueError as e:
    raise ProtocolError(f'a frame is of kind {kind}') from e


def unpack(kind: Kind, payload: bytes) -> Any:
  """Returns the message of a frame; ProtocolError if it is not JSON."""
  try:
    return json.loads(payload)
  # RecursionError: ten thousand brackets.
  except (ValueError, RecursionError) as e:
    raise ProtocolError(f'a {kind.name} is not JSON') from e
