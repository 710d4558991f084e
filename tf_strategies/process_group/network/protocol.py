"""The wire format of the control plane: frames.

Lengths are checked against limits before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import enum
import struct

PROTOCOL_VERSION = 5

MAX_PAYLOAD_BYTES = 1 << 20
_MAX_TAG_BYTES = 512

_FRAME = struct.Struct('!4sBBHQI')
_FRAME_MAGIC = b'TFSC'
FRAME_HEADER_BYTES = _FRAME.size


class ProtocolError(Exception):
  """Bytes that are not of this protocol; internal."""


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
  LATE = 19
  REPORT = 20
  FAILED = 21
  DESCRIBE = 22
  DESCRIPTION = 23
  GOODBYE = 24
  # Launchers of several hosts.
  NODE = 32
  JOB = 33
  STATE = 34


@dataclasses.dataclass(frozen=True)
class Frame:
  """One message of the control plane."""

  kind: Kind
  generation: int = 0
  tag: str = ''
  payload: bytes = b''

  def pack(self) -> bytes:
    """Header, tag and payload."""
    tag = self.tag.encode('utf-8')
    header = _FRAME.pack(
      _FRAME_MAGIC,
      PROTOCOL_VERSION,
      self.kind,
      len(tag),
      self.generation,
      len(self.payload),
    )
    return b''.join((header, tag, self.payload))


def frame_lengths(
  header: bytes, max_payload: int = MAX_PAYLOAD_BYTES
) -> tuple[Kind, int, int, int]:
  """Kind and generation of a frame, and the lengths of its tag and payload.

  Raises:
    ProtocolError: it is none, or announces more than the limits allow.
  """
  magic, version, kind, tag, generation, payload = _FRAME.unpack(header)
  if magic != _FRAME_MAGIC or version != PROTOCOL_VERSION:
    raise ProtocolError(f'a frame begins with {bytes(header[:5])!r}')
  if tag > _MAX_TAG_BYTES or payload > max_payload:
    raise ProtocolError(f'a frame announces {tag} + {payload} bytes')
  try:
    return Kind(kind), generation, tag, payload
  except ValueError as e:
    raise ProtocolError(f'a frame is of kind {kind}') from e


def check_tag(tag: str) -> bool:
  """Returns whether a tag fits into a frame."""
  return len(tag.encode('utf-8')) <= _MAX_TAG_BYTES
