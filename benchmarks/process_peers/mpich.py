"""`MPI.Allreduce`, in processes of mpiexec."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from benchmarks.process_peers import base


class Mpich(base.Peer):
  """`MPI.Allreduce` from one array into another."""

  def prepare(self) -> None:
    """See base class."""
    self._input = base.input_value(MPI.COMM_WORLD.Get_rank(), self.num_elements)
    self._output = np.empty_like(self._input)

  def barrier(self) -> None:
    """See base class."""
    MPI.COMM_WORLD.Barrier()

  def call(self) -> np.ndarray:
    """See base class."""
    MPI.COMM_WORLD.Allreduce(self._input, self._output)
    return self._output

  def result(self, returned: np.ndarray) -> np.ndarray:
    """See base class."""
    return returned

  def release(self) -> None:
    """See base class."""
    self._input = self._output = None
