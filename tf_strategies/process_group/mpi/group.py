"""A process group over MPI, for processes that `mpiexec` started.

  mpiexec -n 4 python train.py

MPI moves bytes between pairs of ranks, through shared memory or whatever it
has between hosts. Who sends what, and which rank adds it in which order, is the
plan's, as over TCP: results have the same bits. `MPI.Allreduce` is not used, because its
bits differ between ranks for NaN and signed zeros.

Such a group is not elastic. When a process is killed, MPI ends the whole job:
start it again from a checkpoint. One that ends by itself, hangs or disagrees
becomes a typed error on the others, as over TCP.
"""

import contextlib
import dataclasses
import secrets
import socket
import time

import numpy as np

from tf_strategies import errors
from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group.mpi import links
from tf_strategies.process_group.network import sockets
from tf_strategies.process_group.rendezvous import rendezvous


def form_mpi_group(
  options: options_lib.GroupOptions | None = None,
) -> 'MpiProcessGroup':
  """Makes a group of all processes that `mpiexec` started.

  All of them call it, at the same point. A process that was started without
  `mpiexec` becomes a group of one. MPI has about two thousand communicators.
  Each call takes one of them for the life of the process.

  Args:
    options: how long to wait; the defaults if None. Addresses and secrets come
      from MPI, and the number of workers is MPI's.

  Returns:
    The group.

  Raises:
    UnsupportedOptionError: mpi4py or an MPI library is missing, or MPI does
      not permit several threads.
    RendezvousError: ranks do not come in time, or cannot reach each other.
  """
  options = options or options_lib.GroupOptions()
  mpi = links.load()
  seconds = options.rendezvous_timeout_seconds
  deadline = time.monotonic() + seconds
  name = mpi.Get_processor_name()
  try:
    comm = links.MpiLinks(mpi, deadline)
    is_alone = len(set(comm.gather_values(name, deadline))) == 1
    host = '127.0.0.1' if is_alone else _own_host()
    listener = sockets.listen(host, 0)
    address = f'{host}:{listener.getsockname()[1]}'
    mine = {'address': address, 'secret': secrets.token_hex(32)}
    told = comm.gather_values(mine, deadline)
  except execution_lib.DeadlineError:
    raise errors.RendezvousError(
      f'Rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size} on {name} waited '
      f'{seconds:g} s for all ranks to call form_mpi_group. Fix: look at the '
      'logs of the others, or raise rendezvous_timeout_seconds.'
    ) from None
  options = dataclasses.replace(
    options,
    secret=told[0]['secret'].encode(),
    min_workers=None,
    max_workers=None,
    rendezvous_timeout_seconds=max(deadline - time.monotonic(), 1.0),
  )
  addresses = {rank: said['address'] for rank, said in enumerate(told)}
  meeting = rendezvous.Rendezvous(
    addresses,
    comm.rank,
    options,
    listener,
    lambda *parts: MpiProcessGroup(comm, meeting, *parts),
  )
  try:
    return meeting.form()
  except BaseException:
    meeting.close()
    raise


def _own_host() -> str:
  """Returns an address at which other hosts find this one."""
  with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as s:
    # Sends nothing: it tells which address leads out of this host.
    s.connect(('192.0.2.1', 9))
    return s.getsockname()[0]
  return socket.gethostname()


class MpiProcessGroup(group_lib.ProcessGroup):
  """A group whose control plane is TCP's, while arrays travel over MPI.

  Made by `form_mpi_group`.

  Args:
    comm: of the ranks.
    meeting: where the group formed; closed with it.
    *parts: see the base class.
  """

  name = 'mpi'
  elastic = False
  candidates = ('direct', 'ring')
  # Each piece costs a handshake and moves only while both ranks call MPI.
  piece_bytes = 1 << 24

  def __init__(self, comm, meeting, *parts):
    super().__init__(*parts)
    self._comm, self._meeting = comm, meeting

  def paths(self) -> dict[int, str]:
    """See base class. MPI does not say how it moves arrays."""
    ranks = range(self.world_size)
    return {rank: self.name for rank in ranks if rank != self.rank}

  def close(self, has_ended: bool = False) -> None:
    """See base class; MPI itself ends with the process."""
    super().close(has_ended)
    self._meeting.close()

  def _move(self, execution, header, deadline) -> None:
    """See base class: waits for all ranks, which must be about to do the same."""
    headers = self._comm.gather_equal(
      np.array(header, np.uint64), deadline, self._state.check
    ).tolist()
    for rank, other in enumerate(headers):
      if other != headers[self.rank]:
        raise execution_lib.MismatchError(rank)
    self._comm.run(execution, deadline, self._state.check)
