"""A process group over MPI, for processes that `mpiexec` started.

  mpiexec -n 4 python train.py

MPI moves the arrays, through shared memory or whatever it has between hosts.
Which rank adds what, in which order, is decided here: MPI promises the same
*values* on all ranks, and MPICH's `Allreduce` does give other bits on other
ranks where zeros have signs or NaNs have payloads. Here one rank computes a
value, or all of them in rank order.

Such a group is not elastic. When a process is killed, MPI ends the whole job:
start it again from a checkpoint. One that ends by itself, hangs or disagrees
becomes a typed error on the others, as over TCP.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence

import numpy as np

from tf_strategies import errors
from tf_strategies.collectives import schedule
from tf_strategies.process_group import checks, failure_detection
from tf_strategies.process_group import combine as combine_lib
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.mpi import control as mpi_control
from tf_strategies.process_group.mpi import links
from tf_strategies.process_group.network import server

_DIGEST_BYTES = 8
# Added in float32.
_HALVES = ('float16', 'bfloat16')


def form_mpi_group(
  options: options_lib.GroupOptions | None = None,
) -> MpiProcessGroup:
  """Makes a group of all processes that `mpiexec` started.

  All of them call it, at the same point. A process that was started without
  `mpiexec` becomes a group of one. Each call takes one of MPI's communicators,
  of which there are about two thousand, for the life of the process.

  Args:
    options: how long to wait; the defaults if None. Addresses and secrets come
      from MPI, and the number of workers is MPI's.

  Returns:
    The group.

  Raises:
    UnsupportedOptionError: mpi4py or an MPI library is missing, or MPI does
      not permit several threads.
    RendezvousError: ranks do not come in time, or cannot reach rank 0.
  """
  options = options or options_lib.GroupOptions()
  mpi = links.load()
  seconds = options.rendezvous_timeout_seconds
  deadline = time.monotonic() + seconds
  host = mpi.Get_processor_name()
  try:
    comm = links.Communicator(mpi, deadline)
    if comm.size == 1:
      alone = state_lib.Member(0, 0, f'{host}:0')
      return MpiProcessGroup(
        comm, state_lib.GroupState([alone], 0, 1), None, None, options
      )
    thread, state, plane = mpi_control.form(comm, host, options, deadline)
  except links.DeadlineError:
    raise errors.RendezvousError(
      f'Rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size} on {host} waited '
      f'{seconds:g} s for all ranks to call form_mpi_group. Look at the logs '
      'of the others, or raise rendezvous_timeout_seconds.'
    ) from None
  return MpiProcessGroup(comm, state, plane, thread, options)


@dataclasses.dataclass(frozen=True)
class _How:
  """What one collective waits with; made when all ranks are there.

  Attributes:
    wait: the deadline and the check of `Communicator.wait`.
    lengths: what each rank said beside what all have in common.
  """

  wait: tuple
  lengths: Sequence[int]


class MpiProcessGroup(group_lib.ProcessGroup):
  """See the base class; made by `form_mpi_group`.

  `bytes_sent` counts what the algorithms must send; a broadcast counts once, on
  its root. How MPI moves it between hosts is its own affair.

  Args:
    comm: of the ranks.
    state: what the group's threads share.
    plane: the control plane; None in a group of one.
    host: the thread that it runs in; closed with the group.
    options: of the group.
  """

  name = 'mpi'
  elastic = False

  def __init__(
    self,
    comm: links.Communicator,
    state: state_lib.GroupState,
    plane: control_plane.ControlPlane | None,
    host: server.Server | None,
    options: options_lib.GroupOptions,
  ):
    super().__init__(state, plane, options)
    self._comm = comm
    self._host = host
    self._bytes_sent = 0
    self._headers = np.empty((comm.size, 2), np.uint64)
    # A process that ends without it would leave the others to their deadlines,
    # as MPI keeps it alive until they end too.
    atexit.register(self.close)

  @property
  def bytes_sent(self) -> int:
    """See base class."""
    return self._bytes_sent

  def all_reduce(
    self,
    array: np.ndarray,
    *,
    op: str = 'sum',
    out: np.ndarray | None = None,
    name: str = '',
    wire: str = 'none',
  ) -> np.ndarray:
    """See base class; 16-bit floats too are added in float32, rounded once."""
    checks.check_reduced(array, op, wire)
    checks.check_out(out, array)
    how = op if wire == 'none' else f'{op} {wire}'
    text = _text(f'all_reduce({how})', name, array.dtype, array.shape)
    with self._lock:
      if out is None:
        out = self._pool.take(array.shape, array.dtype)
      with self._collective(text, name) as running:
        if self.world_size == 1:
          np.copyto(out, array)
        elif array.size:
          self._reduce(array, op, out, wire, running)
    return out

  def _reduce(self, array, op, out, wire, running: _How) -> None:
    size, rank, comm = self.world_size, self.rank, self._comm
    if wire == 'none' and checks.dtype_text(array.dtype) in _HALVES:
      wire = array.dtype.name
      array, out = array.view(np.uint16), out.view(np.uint16)
    small = array.nbytes <= self._options.small_message_bytes
    chunks = schedule.chunk_sizes(array.size, size)
    sizes = [n * array.itemsize for n in chunks]
    low, length = sum(chunks[:rank]), chunks[rank]
    if small:
      low, length = 0, array.size
    rows = self._pool.take((size, length), array.dtype)
    data, flat = array.view(np.uint8), rows.reshape(-1).view(np.uint8)
    if small:
      comm.gather_equal(data, flat, *running.wait)
      self._bytes_sent += (size - 1) * data.nbytes
    else:
      comm.scatter_all(data, sizes, flat, *running.wait)
    combine = combine_lib.combiner(
      array, rows, out, rank, low, checks.UFUNCS[op], wire
    )
    first, last = low * array.itemsize, (low + length) * array.itemsize
    # Pieces that stay in the cache from one rank's row to the next.
    step = -(-self._options.sub_chunk_bytes // array.itemsize) * array.itemsize
    for start in range(first, last, step):
      combine(start, min(start + step, last))
    if not small:
      comm.gather_own(out.view(np.uint8), sizes, *running.wait)
      own = sizes[rank]
      self._bytes_sent += data.nbytes - own + (size - 1) * own

  def all_gather(
    self, array: np.ndarray, *, name: str = ''
  ) -> list[np.ndarray]:
    """See base class."""
    checks.check_gathered(array)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    shape = ('any', *array.shape[1:])
    text = _text('all_gather', name, array.dtype, shape)
    with self._lock, self._collective(text, name, len(array)) as running:
      row = checks.row_bytes(array)
      sizes = [length * row for length in running.lengths]
      flat = self._pool.take(sum(sizes), np.uint8)
      if self.world_size == 1:
        np.copyto(flat, data)
      elif flat.size:
        self._comm.gather(data, flat, sizes, *running.wait)
        self._bytes_sent += (self.world_size - 1) * data.nbytes
    ends = np.cumsum(sizes).tolist()
    return [
      flat[end - size : end].view(array.dtype).reshape(n, *array.shape[1:])
      for end, size, n in zip(ends, sizes, running.lengths, strict=True)
    ]

  def broadcast(
    self, array: np.ndarray, root: int, *, name: str = ''
  ) -> np.ndarray:
    """See base class."""
    checks.check_dtype(array, 'broadcast')
    size = self.world_size
    if not schedule.is_int(root) or not 0 <= root < size:
      raise errors.UnsupportedOptionError(
        f'root={root!r}',
        f'a rank from 0 to {size - 1}',
        'pass the rank whose values all are to get',
      )
    text = _text('broadcast', name, array.dtype, array.shape)
    with self._lock:
      out = self._pool.take(array.shape, array.dtype)
      if self.rank == root:
        np.copyto(out, array)
      with self._collective(f'{text} from rank {root}', name) as running:
        if size > 1 and out.size:
          data = out.reshape(-1).view(np.uint8)
          self._comm.broadcast(data, root, *running.wait)
          self._bytes_sent += data.nbytes if self.rank == root else 0
    return out

  def barrier(self, *, name: str = '') -> None:
    """See base class."""
    with self._lock, self._collective(f'barrier {name!r}', name):
      pass

  def close(self) -> None:
    """See base class; MPI itself ends with the process."""
    if self._closed:
      return
    self._closed = True
    atexit.unregister(self.close)
    if self._control is not None:
      self._control.close()
      self._host.close()

  @contextlib.contextmanager
  def _collective(
    self, text: str, name: str, length: int = 0
  ) -> Iterator[_How]:
    """Brings all ranks together; what goes wrong ends the whole group."""
    self._check()
    operation = self._state.begin(text, name)
    seconds = self._options.collective_timeout_seconds
    try:
      # After `begin`: a goodbye that comes now sees a collective to end.
      for rank in self._state.departed:
        self._state.fail(self._state.left(rank))
      how = (operation.since + seconds, self._check)
      lengths = (length,)
      if self.world_size > 1:
        lengths = self._meet(operation, length, how)
      yield _How(how, lengths)
    except errors.Error:
      raise
    except links.DeadlineError:
      waiting = [r for r in range(self.world_size) if r != self.rank]
      self._control.report(
        failure_detection.timeout(operation, seconds, waiting)
      )
      self._state.check()
      raise
    except BaseException as e:
      # An interrupt, say: bytes are in the middle of something.
      self.abort(f'{type(e).__name__} during a collective')
      raise
    finally:
      self._state.end()

  def _meet(
    self, operation: state_lib.Operation, length: int, how: tuple
  ) -> list[int]:
    """Waits for all ranks and compares what they are about to do."""
    digest = hashlib.blake2b(
      f'{operation.sequence} {operation.text}'.encode(),
      digest_size=_DIGEST_BYTES,
    ).digest()
    mine = np.array([int.from_bytes(digest, 'little'), length], np.uint64)
    self._comm.gather_equal(
      mine.view(np.uint8),
      self._headers.reshape(-1).view(np.uint8),
      *how,
      moving=False,
    )
    digests, lengths = self._headers.T.tolist()
    others = [r for r, d in enumerate(digests) if d != digests[self.rank]]
    if others:
      self._control.report(failure_detection.mismatch(operation, others[0]))
      self._state.check()
    return lengths


def _text(kind: str, name: str, dtype: np.dtype, shape: Sequence) -> str:
  """What all ranks must have in common, as messages tell it."""
  return f'{kind} {name!r} of {checks.dtype_text(dtype)}{list(shape)}'
