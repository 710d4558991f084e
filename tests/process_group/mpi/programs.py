"""Programs that the ranks in mpi_test.py run. Each writes its notes to a file.

mpiexec -n 3 python -m tests.process_group.mpi.programs <program> <directory>
"""

import concurrent.futures
import os
import pathlib
import pickle
import signal
import sys
import time

import numpy as np

from tests.process_group import conformance
from tf_strategies import errors, process_group
from tf_strategies.process_group.mpi import links


def _group(**options):
  return process_group.form_mpi_group(process_group.GroupOptions(**options))


def table(note):
  with conformance.small_pieces(), _group() as group:
    note['table'] = group.rank, conformance.run(group)


def move(note):
  """Runs `_move` outside the thread that initialized MPI."""
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(_move, note).result()


def _move(note):
  with _group() as group:
    rank, size = group.rank, group.world_size
    note['who'] = (rank, size, group.name, group.elastic, group.generation)
    conformance.check_moves(group)
    before = group.bytes_sent
    group.all_reduce(np.ones(12 * 4096, np.float32))
    note['sent'] = group.bytes_sent - before
    conformance.check_barrier(group)


# Call of the last rank, which differs from the call of the others.
DISAGREEMENTS = {
  'name': lambda g, odd: g.all_reduce(np.ones(3), name='b' if odd else 'a'),
  'kind': lambda g, odd: g.barrier() if odd else g.all_reduce(np.ones(1 << 18)),
}


def disagree(note):
  for what, act in DISAGREEMENTS.items():
    with _group() as group:
      group.barrier()
      note[what] = _failure(
        group, lambda g=group, a=act: a(g, g.rank == g.world_size - 1)
      )


def _failure(group, act):
  """Returns the error of a collective. Checks that later calls raise it too."""
  start = time.monotonic()
  try:
    act()
  except errors.Error as e:
    seen = (type(e).__name__, str(e), e.ranks, getattr(e, 'rank', None))
    again = group.failure
    assert (type(again).__name__, str(again)) == seen[:2]
    try:
      group.barrier()
    except errors.Error as e2:
      assert str(e2) == str(e)
      return (*seen, time.monotonic() - start)
  raise AssertionError('nothing was raised')


def leave(note):
  """Ends rank 1 without notice. The other ranks continue."""
  group = _group()
  group.barrier()
  if group.rank == 1:
    return
  note['failure'] = _failure(group, group.barrier)


def stop(note):
  """Stops rank 1. Only missing heartbeats show this; MPI itself would wait."""
  links._FINALIZE_SECONDS = 1.0
  group = _group(heartbeat_timeout_seconds=2.0)
  group.barrier()
  if group.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
  note['failure'] = _failure(group, group.barrier)


def die(note):
  group = _group()
  group.barrier()
  if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
  note['failure'] = _failure(group, group.barrier)


def run(program, directory):
  """Runs one of the functions above and writes its notes."""
  note = {}
  globals()[program](note)
  # mpi4py has initialized MPI.
  path = pathlib.Path(directory, str(links.load().COMM_WORLD.rank))
  path.with_suffix('.part').write_bytes(pickle.dumps(note))
  path.with_suffix('.part').rename(path.with_suffix('.pickle'))


if __name__ == '__main__':
  run(*sys.argv[1:])
