"""The wire format: headers of collectives, and frames of the control plane.

Lengths are checked against limits before anything is allocated.

Example:

  >>> from tf_strategies.process_group.network import protocol
  >>> header = protocol.DataHeader('barrier', 1, 7, 'direct', 'none', '', 0, 0, 0)
  >>> protocol.DataHeader.unpack(header.pack()) == header
  True
"""

from __future__ import annotations

import dataclasses
import enum
import struct

PROTOCOL_VERSION = 3

MAX_PAYLOAD_BYTES = 1 << 20
_MAX_TAG_BYTES = 512

_DATA = struct.Struct('!4sB15sQQ15s15s15sQQI')
_DATA_MAGIC = b'TFSD'
DATA_HEADER_BYTES = _DATA.size

_FRAME = struct.Struct('!4sBBHQI')
_FRAME_MAGIC = b'TFSC'
FRAME_HEADER_BYTES = _FRAME.size


class ProtocolError(Exception):
  """Bytes that are not of this protocol; internal."""


@dataclasses.dataclass(frozen=True)
class DataHeader:
  """Comes before the bytes of one collective on each link that it uses.

  Two ranks that are at the same collective have equal headers: `checksum` is of
  everything that must agree, the rest tells people.
  """

  kind: str
  generation: int
  sequence: int
  algorithm: str
  op: str
  dtype: str
  num_bytes: int
  extra: int
  checksum: int

  def __str__(self):
    return (
      f'{self.kind}({self.op}) of {self.num_bytes} bytes of {self.dtype} by '
      f'{self.algorithm}, sequence {self.sequence} of generation '
      f'{self.generation}'
    )

  def pack(self) -> bytes:
    """The header as `DATA_HEADER_BYTES` bytes."""
    return _DATA.pack(
      _DATA_MAGIC,
      PROTOCOL_VERSION,
      self.kind.encode(),
      self.generation,
      self.sequence,
      self.algorithm.encode(),
      self.op.encode(),
      self.dtype.encode(),
      self.num_bytes,
      self.extra,
      self.checksum,
    )

  @classmethod
  def unpack(cls, data: bytes) -> DataHeader:
    """The header of `DATA_HEADER_BYTES` bytes; ProtocolError if they are none."""
    magic, version, *values = _DATA.unpack(data)
    if magic != _DATA_MAGIC or version != PROTOCOL_VERSION:
      raise ProtocolError(f'a data header begins with {bytes(data[:5])!r}')
    return cls(
      *(
        v.rstrip(b'\0').decode('ascii', 'replace')
        if isinstance(v, bytes)
        else v
        for v in values
      )
    )


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
  CUT = 9
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
  TASK = 34


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
  """Whether a tag fits into a frame."""
  return len(tag.encode('utf-8')) <= _MAX_TAG_BYTES
