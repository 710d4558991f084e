"""Our process groups, called from Python and from a graph."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import tensorflow as tf

import tf_strategies as tfs
from benchmarks.process_peers import base
from tf_strategies import process_group
from tf_strategies.process_group.tcp import host_memory


class Group(base.Peer):
  """`all_reduce` of a process group, in place."""

  def __init__(self, seat: base.Seat):
    super().__init__(seat)
    self._group = self._form()

  def _form(self, **settings) -> process_group.ProcessGroup:
    options = process_group.GroupOptions.from_env(
      rendezvous_timeout_seconds=self.seat.timeout_seconds,
      collective_timeout_seconds=self.seat.timeout_seconds,
      **settings,
    )
    # Must exist as long as its group.
    self._rendezvous = process_group.Rendezvous(
      dict(enumerate(self.seat.addresses)), self.seat.rank, options
    )
    return self._rendezvous.form()

  def prepare(self) -> None:
    """See base class."""
    self._input = base.input_value(self._group.rank, self.num_elements)
    self._output = np.empty_like(self._input)

  def barrier(self) -> None:
    """See base class."""
    self._group.barrier()

  def call(self) -> np.ndarray:
    """See base class."""
    return self._group.all_reduce(self._input, out=self._output)

  def result(self, returned: np.ndarray) -> np.ndarray:
    """See base class."""
    return returned

  def release(self) -> None:
    """See base class."""
    self._input = self._output = None


class Tcp(Group):
  """`Group` over TCP, without shared memory."""

  def prepare(self) -> None:
    """See base class. Also opens the links, without shared memory."""
    super().prepare()
    with mock.patch.object(host_memory, 'MemorySlots', side_effect=OSError):
      super().call()

  def _form(self, **settings) -> process_group.ProcessGroup:
    with mock.patch.object(host_memory, 'MemorySlots', side_effect=OSError):
      return super()._form(**settings)


class Mpi(Group):
  """`Group` over MPI, in processes of mpiexec."""

  def _form(self) -> process_group.ProcessGroup:
    return process_group.form_mpi_group()


class _InGraph(base.Peer):
  """A step in a `tf.function`, which `prepare` creates."""

  def call(self) -> tf.Tensor:
    """See base class."""
    return self._step()

  def result(self, returned: tf.Tensor) -> np.ndarray:
    """See base class."""
    return returned.numpy()

  def release(self) -> None:
    """See base class."""
    self._step = None


class Replicated(_InGraph):
  """`ReplicaContext.all_reduce` in a `tf.function` under a strategy.

  The tensor is the value of a variable. A graph would fold a constant.
  """

  def __init__(self, seat: base.Seat):
    super().__init__(seat)
    self._strategy = self.make_strategy()
    with tf.device('CPU:0'):
      one = tf.Variable([1.0])
    self._barrier = self._all_reduce(one)

  def make_strategy(self) -> tf.distribute.Strategy:
    """Returns our strategy with default options."""
    return tfs.MultiWorkerRingStrategy(self.cluster(), devices=['CPU:0'])

  def cluster(self) -> tfs.cluster.ClusterConfig:
    """Returns the cluster with the task of this worker."""
    task = {'type': 'worker', 'index': self.seat.rank}
    workers = {'worker': list(self.seat.addresses)}
    text = json.dumps({'cluster': workers, 'task': task})
    return tfs.cluster.ClusterConfig.from_env({'TF_CONFIG': text})

  def _all_reduce(self, source: tf.Variable):
    """Returns a function that sums `source` over all workers."""

    def replica():
      context = tf.distribute.get_replica_context()
      return context.all_reduce(tf.distribute.ReduceOp.SUM, source.read_value())

    @tf.function
    def step():
      return self._strategy.experimental_local_results(
        self._strategy.run(replica)
      )[0]

    return step

  def prepare(self) -> None:
    """See base class."""
    with tf.device('CPU:0'):
      value = base.input_value(self.seat.rank, self.num_elements)
      self._step = self._all_reduce(tf.Variable(value))

  def barrier(self) -> None:
    """See base class."""
    self._barrier()


class NoOp(_InGraph):
  """A call from a graph to Python that returns its input."""

  def prepare(self) -> None:
    """See base class."""
    source = tf.Variable(self.expected())

    @tf.function
    def step():
      return tf.numpy_function(lambda x: x, [source.read_value()], tf.float32)

    self._step = step

  def expected(self) -> np.ndarray:
    """See base class."""
    return base.input_value(self.seat.rank, self.num_elements)

  def barrier(self) -> None:
    """See base class. Does not wait."""
