"""All peers, their processes, and whether they are available."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys

from benchmarks import processes
from tf_strategies import errors

OURS = 'ours'
OTHER = 'other'
LIMIT = 'limit'

_HERE = 'benchmarks.process_peers'
_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Entry:
  """The description of a peer.

  Attributes:
    name: name in flags, tables and JSON.
    kind: OURS, OTHER, or LIMIT for a peer without a reduction.
    pool: name of its pool. Peers of the same pool share processes.
    path: its class, as 'module:Class'.
  """

  name: str
  kind: str
  pool: str
  path: str


ENTRIES = tuple(
  Entry(name, kind, pool, f'{_HERE}.{path}')
  for name, kind, pool, path in (
    ('ours_memory', OURS, 'ours', 'ours:Group'),
    ('ours_tcp', OURS, 'ours', 'ours:Tcp'),
    ('ours_in_graph', OURS, 'ours', 'ours:Replicated'),
    ('ours_mpi', OURS, 'mpi', 'ours:Mpi'),
    ('mpich', OTHER, 'mpi', 'mpich:Mpich'),
    ('mwms_ring', OTHER, 'mwms', 'tensorflow_collectives:MultiWorkerMirrored'),
    ('gloo', OTHER, 'gloo', 'gloo:Gloo'),
    ('no_op', LIMIT, 'ours', 'ours:NoOp'),
  )
)
NAMES = tuple(entry.name for entry in ENTRIES)


def mpiexec() -> str | None:
  """Returns the path of mpiexec in this environment or else the system."""
  beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
  return beside if os.path.exists(beside) else shutil.which('mpiexec')


def reason_unavailable(
  entry: Entry, torch_python: str, over_links: bool
) -> str | None:
  """Returns a sentence why a peer is unavailable, or None if it is available.

  Args:
    entry: description of the peer.
    torch_python: interpreter that may have torch.
    over_links: whether the workers run on simulated hosts.
  """
  if entry.pool == 'gloo':
    return _reason_without_torch(torch_python)
  if entry.pool != 'mpi':
    return None
  if importlib.util.find_spec('mpi4py') is None:
    return "mpi4py is not importable: in the checkout, pip install '.[mpi]'."
  if mpiexec() is None:
    return 'There is no mpiexec: install MPICH.'
  if over_links:
    return 'Ranks of one mpiexec share memory, and would pass the links by.'
  return None


def _reason_without_torch(torch_python: str) -> str | None:
  try:
    done = processes.run(
      [torch_python, '-c', 'import torch.distributed'],
      env=processes.environment(without=['PYTHONPATH']),
      deadline_seconds=_SECONDS,
    )
  except errors.WorkerUnavailableError as e:
    return f'--torch_python does not run: {e}'
  if done.returncode:
    return (
      'torch is not importable: install it, or name an interpreter that has '
      'it with --torch_python.'
    )
  return None
