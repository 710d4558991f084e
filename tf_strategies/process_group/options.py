"""One frozen options object for process groups.

Example:

  >>> from tf_strategies.process_group import options
  >>> options.GroupOptions(min_workers=2).collective_timeout_seconds
  600.0
"""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import Any

from tf_strategies import errors, option_checks

SECRET_VARIABLE = 'TFS_SECRET'
SECRET_FILE_VARIABLE = 'TFS_SECRET_FILE'

MAJORITY = 'majority'
"""As `min_workers`: a majority of the last group, or of the cluster if there was none.
So only one side of a cut network continues."""

_MIN_SECRET_BYTES = 16


@option_checks.has_options
@dataclasses.dataclass(frozen=True)
class GroupOptions:
  """Options for how processes find each other, how long they wait, and security.

  Attributes:
    rendezvous_timeout_seconds: seconds for which `form` waits for the others.
    collective_timeout_seconds: seconds that one collective may take while all
      workers are alive.
    heartbeat_timeout_seconds: seconds of silence after which a worker counts as lost.
    secret: secret of the job, 16 bytes or more. Peers prove to each other that they
      know it. It never travels. The data is neither encrypted nor signed.
    allow_unauthenticated: permits a job without a secret to use addresses of other
      hosts, and peers of other users on this host.
    min_workers: smallest number of workers that may form a group; None means all.
      With less than a majority, both halves of a split network could continue.
      With 'majority', a group that forms again has a majority of the last group (in a
      tie, the half with its lowest task), or all workers not known to be dead.
    max_workers: largest number of workers that form a group; None means all.
    window_seconds: seconds to wait for more workers after `min_workers` have come.
  """

  rendezvous_timeout_seconds: float = 300.0
  collective_timeout_seconds: float = 600.0
  heartbeat_timeout_seconds: float = 20.0
  secret: bytes | None = dataclasses.field(default=None, repr=False)
  allow_unauthenticated: bool = False
  min_workers: int | str | None = None
  max_workers: int | None = None
  window_seconds: float = 5.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if field.name.endswith('_seconds'):
        option_checks.check_seconds(
          field.name,
          getattr(self, field.name),
          or_zero=field.name == 'window_seconds',
        )
    if self.max_workers is not None:
      option_checks.check_int('max_workers', self.max_workers, 1)
    if isinstance(self.min_workers, str):
      option_checks.check_choice('min_workers', self.min_workers, [MAJORITY])
    elif self.min_workers is not None:
      option_checks.check_int('min_workers', self.min_workers, 1)
      option_checks.check(
        self.max_workers is None or self.min_workers <= self.max_workers,
        f'min_workers={self.min_workers} with max_workers={self.max_workers}',
        'a minimum that is not above the maximum',
        'lower min_workers or raise max_workers',
      )
    option_checks.check_bool(
      'allow_unauthenticated', self.allow_unauthenticated
    )
    if self.secret is not None:
      expected = f'{_MIN_SECRET_BYTES} bytes or more'
      option_checks.check_type(
        'secret',
        self.secret,
        bytes,
        expected,
        "encode a string: secret=text.encode('utf-8')",
      )
      option_checks.check(
        len(self.secret) >= _MIN_SECRET_BYTES,
        f'a secret of {len(self.secret)} bytes',
        expected,
        'make one with python -c "import secrets; '
        'print(secrets.token_hex(32))" and give it to every worker',
      )

  @property
  def same_user(self) -> bool:
    """Returns whether peers, on this host, must be processes of this user.

    A loopback address is open to all users.
    """
    return not (self.secret or self.allow_unauthenticated)

  @classmethod
  def from_env(cls, **overrides: Any) -> GroupOptions:
    """Returns options with the secret that the environment names.

    The secret is the value of TFS_SECRET, or the contents of the file that
    TFS_SECRET_FILE names (without surrounding white space), or None if neither
    is set. Attributes in `overrides` come first.

    Raises:
      UnsupportedOptionError: both are set, a secret is too short, TFS_TLS_CERT is
        set, the file cannot be read, or other users have access to it. They may read it only on a
        read-only mount, on which orchestrators put secrets for containers.
    """
    if 'secret' not in overrides:
      overrides['secret'] = _secret_from_env()
    option_checks.check(
      'TFS_TLS_CERT' not in os.environ,
      'TFS_TLS_CERT, and nothing would be encrypted',
      'workers on a trusted network or a VPN',
      'unset it',
    )
    return cls(**overrides)


def _secret_from_env() -> bytes | None:
  text = os.environ.get(SECRET_VARIABLE)
  path = os.environ.get(SECRET_FILE_VARIABLE)
  option_checks.check(
    text is None or path is None,
    'both',
    f'{SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}',
    f'unset {SECRET_VARIABLE} to use the file',
  )
  if text is not None:
    return text.strip().encode('utf-8')
  if path is None:
    return None
  try:
    with open(path, 'rb') as file:
      _check_access(path, file.fileno())
      return file.read().strip()
  except OSError as e:
    raise errors.UnsupportedOptionError(
      f'{SECRET_FILE_VARIABLE}={path!r} ({e.strerror})',
      'a file that this process can read',
      'mount the secret there, or unset the variable',
    ) from e


def _check_access(path: str, file: int) -> None:
  """Raises if another user may read or replace the contents of an open file.

  It follows links: Kubernetes mounts links to files of mode 0644, or 0440 for a group,
  that root owns, on a read-only file system.
  """
  if os.fstatvfs(file).f_flag & os.ST_RDONLY:
    return
  found = os.fstat(file)
  mode = stat.S_IMODE(found.st_mode)
  is_mine = found.st_uid in (0, os.geteuid())
  if is_mine and not mode & (stat.S_IRWXO | stat.S_IWGRP):
    return
  raise errors.UnsupportedOptionError(
    f'{SECRET_FILE_VARIABLE}={path!r} of mode {mode:04o}, user {found.st_uid}',
    'a file of this user or root with mode 0640 or stricter',
    f'chmod 600 {path}' if is_mine else f'copy it; chmod 600 {path}',
  )
