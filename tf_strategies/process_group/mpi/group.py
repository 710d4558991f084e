"""A process group over MPI, for processes that `mpiexec` started.

  mpiexec -n 4 python train.py

MPI moves bytes between pairs of ranks, through shared memory or whatever it
has between hosts. Who sends what, and which rank adds it in which order, is the
plan's, as over TCP: results have the same bits.

Such a group is not elastic. When a process is killed, MPI ends the whole job:
start it again from a checkpoint. One that ends by itself, hangs or disagrees
becomes a typed error on the others, as over TCP.
"""

from __future__ import annotations

import time

import numpy as np

from tf_strategies import errors
from tf_strategies.process_group import execution as execution_lib
from tf_strategies.process_group import group as group_lib
from tf_strategies.process_group import options as options_lib
from tf_strategies.process_group import state as state_lib
from tf_strategies.process_group.control import control_plane
from tf_strategies.process_group.mpi import control as mpi_control
from tf_strategies.process_group.mpi import links
from tf_strategies.process_group.network import server


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
  options = options_lib.given_or_default(options)
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
  except execution_lib.DeadlineError:
    raise errors.RendezvousError(
      f'Rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size} on {host} waited '
      f'{seconds:g} s for all ranks to call form_mpi_group. Look at the logs '
      'of the others, or raise rendezvous_timeout_seconds.'
    ) from None
  return MpiProcessGroup(comm, state, plane, thread, options)


class MpiProcessGroup(group_lib.ProcessGroup):
  """See the base class; made by `form_mpi_group`.

  Args:
    comm: of the ranks.
    state: what the group's threads share.
    plane: the control plane; None in a group of one.
    host: the thread that it runs in; closed with the group.
    options: of the group.
  """

  name = 'mpi'
  elastic = False
  candidates = ('direct', 'ring')
  default_piece_bytes = 1 << 24

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

  @property
  def bytes_sent(self) -> int:
    """See base class."""
    return self._bytes_sent

  def paths(self) -> dict[int, str]:
    """See base class; how MPI moves them it does not say."""
    others = set(range(self.world_size)) - {self.rank}
    return dict.fromkeys(sorted(others), self.name)

  def _leave(self, has_ended: bool) -> None:
    """See base class; MPI itself ends with the process."""
    if self._control is not None:
      self._control.close(has_ended)
      self._host.close()

  def _move(self, execution, collective, operation, deadline) -> None:
    """See base class: waits for all ranks, which must be about to do the same."""
    mine = np.array([operation.sequence, collective.digest], np.uint64)
    self._comm.gather_equal(
      mine.view(np.uint8),
      self._headers.view(np.uint8).reshape(-1),
      deadline,
      self._check,
      moving=False,
    )
    headers = self._headers.tolist()
    for rank, other in enumerate(headers):
      if other != headers[self.rank]:
        raise execution_lib.MismatchError(rank)
    self._comm.run(execution, deadline, self._check)
    self._bytes_sent += execution.plan.bytes_sent
