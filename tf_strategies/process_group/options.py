"""One frozen options object for process groups.

Example:

  >>> from tf_strategies.process_group import options
  >>> options.GroupOptions(min_workers=2).collective_timeout_seconds
  600.0
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from tf_strategies import errors, option_checks

SECRET_VARIABLE = 'TFS_SECRET'
SECRET_FILE_VARIABLE = 'TFS_SECRET_FILE'

# As `min_workers`: a majority of the last group, so that only one side of a network
# that is cut goes on; of the cluster, if there was none.
MAJORITY = 'majority'

_MIN_SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True)
class GroupOptions:
  """How processes find each other, how long they wait, how they move bytes.

  Attributes:
    rendezvous_timeout_seconds: how long `form` waits for the others.
    collective_timeout_seconds: how long one collective may take while all
      workers are alive.
    heartbeat_interval_seconds: between two heartbeats.
    heartbeat_timeout_seconds: the silence after which a worker counts as
      lost; at least twice the interval.
    secret: what every worker of the job knows, 16 bytes or more. Peers prove
      to each other that they know it; it never travels. What is sent after
      that is neither encrypted nor signed: keep it inside a trusted network.
    allow_unauthenticated: permits addresses beyond this host without a secret.
    min_workers: the fewest that may form a group; None is all of them. With a
      number below a majority both halves of a split network could go on; with
      'majority' a group that forms again has a majority of the last one (with a tie,
      the half with its lowest task), or all that have not surely died.
    max_workers: the most that form a group; None is all of them.
    window_seconds: how long to wait for more once `min_workers` are there.
    small_message_bytes: buffers up to this size go to all ranks in one round;
      larger ones go around a ring.
    sub_chunk_bytes: what travels as one piece, so that additions overlap with
      transfers. None is 512 KiB over TCP and 16 MiB over MPI, where each piece
      costs a handshake and moves only while both ranks call MPI.
    socket_buffer_bytes: of each data link, in each direction; 0 lets the
      operating system choose.
  """

  rendezvous_timeout_seconds: float = 300.0
  collective_timeout_seconds: float = 600.0
  heartbeat_interval_seconds: float = 1.0
  heartbeat_timeout_seconds: float = 20.0
  secret: bytes | None = dataclasses.field(default=None, repr=False)
  allow_unauthenticated: bool = False
  min_workers: int | str | None = None
  max_workers: int | None = None
  window_seconds: float = 5.0
  small_message_bytes: int = 1 << 16
  sub_chunk_bytes: int | None = None
  socket_buffer_bytes: int = 0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if field.name.endswith('_seconds'):
        option_checks.check_seconds(
          field.name,
          getattr(self, field.name),
          or_zero=field.name == 'window_seconds',
        )
    for name, least in (
      ('min_workers', 1),
      ('max_workers', 1),
      ('small_message_bytes', 0),
      ('sub_chunk_bytes', 64),
      ('socket_buffer_bytes', 0),
    ):
      value = getattr(self, name)
      if name == 'min_workers' and value == MAJORITY:
        continue
      if value is not None or getattr(type(self), name) is not None:
        option_checks.check_int(name, value, least)
    option_checks.check_bool(
      'allow_unauthenticated', self.allow_unauthenticated
    )
    if self.heartbeat_timeout_seconds < 2 * self.heartbeat_interval_seconds:
      raise errors.UnsupportedOptionError(
        f'heartbeat_timeout_seconds={self.heartbeat_timeout_seconds!r} with '
        f'heartbeat_interval_seconds={self.heartbeat_interval_seconds!r}',
        'a timeout of at least two intervals',
        'raise the timeout or shorten the interval',
      )
    is_number = isinstance(self.min_workers, int)
    if (
      is_number
      and self.max_workers is not None
      and (self.min_workers > self.max_workers)
    ):
      raise errors.UnsupportedOptionError(
        f'min_workers={self.min_workers} with max_workers={self.max_workers}',
        'a minimum that is not above the maximum',
        'lower min_workers or raise max_workers',
      )
    secret = self.secret
    if secret is not None and not isinstance(secret, bytes):
      raise errors.UnsupportedOptionError(
        f'a secret of type {type(secret).__name__}',
        f'bytes, {_MIN_SECRET_BYTES} or more',
        "encode a string: secret=text.encode('utf-8')",
      )
    if secret is not None and len(secret) < _MIN_SECRET_BYTES:
      raise errors.UnsupportedOptionError(
        f'a secret of {len(secret)} bytes',
        f'{_MIN_SECRET_BYTES} bytes or more',
        'make one with python -c "import secrets; '
        'print(secrets.token_hex(32))" and give it to every worker',
      )

  @classmethod
  def from_env(cls, **overrides: Any) -> GroupOptions:
    """Options with the secret that the environment names.

    It is the value of TFS_SECRET, or the contents of the file that
    TFS_SECRET_FILE names (without surrounding white space), or None if neither
    is set. `overrides` are attributes; a `secret` among them wins.

    Raises:
      UnsupportedOptionError: both are set, a secret is too short, or the file
        cannot be read.
    """
    if 'secret' not in overrides:
      overrides['secret'] = _secret_from_env()
    return cls(**overrides)


def _secret_from_env() -> bytes | None:
  text = os.environ.get(SECRET_VARIABLE)
  path = os.environ.get(SECRET_FILE_VARIABLE)
  if text is not None and path is not None:
    raise errors.UnsupportedOptionError(
      f'{SECRET_VARIABLE} together with {SECRET_FILE_VARIABLE}',
      'one of them',
      f'unset {SECRET_VARIABLE} to use the file',
    )
  if text is not None:
    return text.strip().encode('utf-8')
  if path is None:
    return None
  try:
    return pathlib.Path(path).read_bytes().strip()
  except OSError as e:
    raise errors.UnsupportedOptionError(
      f'{SECRET_FILE_VARIABLE}={path!r} ({e.strerror})',
      'a file that this process can read',
      'mount the secret there, or unset the variable',
    ) from e
