"""Certificates for jobs in tests."""

from __future__ import annotations

import os

from benchmarks import processes
from tf_strategies import process_group

_SECONDS = 60.0


def files(directory: str) -> process_group.TlsFiles:
  """Returns the files that `make` creates in a directory."""
  certificate, key = (
    os.path.join(directory, name) for name in ('certificate.pem', 'key.pem')
  )
  # The certificate is self-signed, so it is its own authority.
  return process_group.TlsFiles(certificate, key, certificate)


def make(directory: str) -> process_group.TlsFiles:
  """Makes a certificate with `openssl`. It is valid for two days."""
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
