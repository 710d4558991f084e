"""Certificates for jobs of tests."""

from __future__ import annotations

import os

from benchmarks import processes
from tf_strategies import process_group

_SECONDS = 60.0


def files(directory: str) -> process_group.TlsFiles:
  """The files that `make` makes in a directory."""
  certificate, key = (
    os.path.join(directory, name) for name in ('certificate.pem', 'key.pem')
  )
  # It signs itself, so it is its own authority.
  return process_group.TlsFiles(certificate, key, certificate)


def make(directory: str) -> process_group.TlsFiles:
  """Makes a certificate, valid for two days, with the program `openssl`."""
  made = files(directory)
  kind = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes']
  about = ['-days', '2', '-subj', '/CN=job']
  where = ['-keyout', made.key, '-out', made.certificate]
  processes.run(
    ['openssl', 'req', '-x509', *kind, *about, *where],
    is_checked=True,
    deadline_seconds=_SECONDS,
  )
  os.chmod(made.key, 0o600)
  return made
