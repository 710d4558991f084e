"""The programs of the ranks in mpi_test.py. Each leaves its notes in a file."""

import concurrent.futures
import os
import pathlib
import pickle
import signal
import time

import numpy as np

from tests.process_group import conformance
from tf_strategies import errors, process_group
from tf_strategies.process_group.mpi import links


def numbers(rank, size, dtype):
  """Tells ranks and positions apart; sums of floats depend on their order."""
  generator = np.random.default_rng([rank, size])
  values = generator.uniform(-20, 20, size) + rank + np.arange(size) % 7
  return values.astype(dtype)


def rows(rank):
  """Returns rows of two columns: no rows on rank 1."""
  count = 0 if rank == 1 else 2 * rank + 3
  return rank * 1000 + np.arange(2 * count, dtype=np.float32).reshape(-1, 2)


def raw(array):
  """An array as something that can be compared bit by bit."""
  return str(array.dtype), array.shape, array.tobytes()


def _group(**options):
  return process_group.form_mpi_group(process_group.GroupOptions(**options))


def table(note):
  with conformance.small_pieces(), _group() as group:
    note['table'] = group.rank, conformance.run(group)


def move(note):
  """Runs `_move` in a thread other than the one that initialised MPI."""
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(_move, note).result()


def _move(note):
  with _group() as group:
    rank, size = group.rank, group.world_size
    note['who'] = (rank, size, group.name, group.elastic, group.generation)
    note['gathered'] = [raw(a) for a in group.all_gather(rows(rank))]
    note['empty'] = [raw(a) for a in group.all_gather(np.empty((0, 3)))]
    for root in range(size):
      for key, array in (
        ('many', numbers(rank, 30000, np.float64).reshape(3, -1)),
        ('scalar', np.array(rank + 0.5, '>f4')),
        ('none', np.empty((2, 0), np.int32)),
      ):
        note[root, key] = raw(group.broadcast(array, root))
    before = group.bytes_sent
    group.all_reduce(np.ones(12 * 4096, np.float32))
    note['sent'] = group.bytes_sent - before
    # Nobody leaves a barrier before everyone has come.
    time.sleep(0.2 * rank)
    came = time.monotonic()
    group.barrier()
    note['barrier'] = (came, time.monotonic())


# What the last rank does otherwise than the others.
DISAGREEMENTS = {
  'size': lambda g, odd: g.all_reduce(np.ones(4 if odd else 3)),
  'dtype': lambda g, odd: g.all_reduce(np.ones(3, 'i8' if odd else 'f8')),
  'op': lambda g, odd: g.all_reduce(np.ones(3), op='min' if odd else 'sum'),
  'name': lambda g, odd: g.all_reduce(np.ones(3), name='b' if odd else 'a'),
  'root': lambda g, odd: g.broadcast(np.ones(3), 1 if odd else 0),
  'columns': lambda g, odd: g.all_gather(np.ones((2, 4 if odd else 3))),
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
  """Returns the error of a collective, which the group must then raise again."""
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
  """Rank 1 ends without a word, the others go on."""
  group = _group()
  group.barrier()
  if group.rank == 1:
    return
  note['failure'] = _failure(group, group.barrier)


def stop(note):
  """Rank 1 is stopped: only silence says so, and MPI itself would wait."""
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
  # mpi4py has initialised MPI by now.
  rank = links.load().COMM_WORLD.rank
  path = pathlib.Path(directory, str(rank))
  path.with_suffix('.part').write_bytes(pickle.dumps(note))
  path.with_suffix('.part').rename(path.with_suffix('.pickle'))
