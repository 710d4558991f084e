"""Workers that are linked by a process group of ours: host calls in one order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, errors, process_group
from tf_strategies.collectives import algorithms, codecs
from tf_strategies.strategies import communicator
from tf_strategies.strategies.mirrored import reducer
from tf_strategies.strategies.multi_worker import (
  collective_queue,
  piece_collectives,
)
from tf_strategies.strategies.multi_worker import options as options_lib

# How many of a bucket's tensors a timeline spells out.
_NAMED = 6


class ProcessGroupCommunicator(
  piece_collectives.PieceCollectives, communicator.Communicator
):
  """Local devices are reduced in the graph, workers by host calls."""

  def __init__(
    self,
    group: process_group.ProcessGroup | None,
    local: reducer.DeviceReducer,
    options: options_lib.RingOptions,
  ):
    self._queue = collective_queue.CollectiveQueue(group, self.join)
    self._local = local
    self._options = options
    self.is_lossy = options.compression != 'none'
    self._num_chunks = self.capacity
    if options.all_reduce != 'auto':
      schedule = algorithms.build(options.all_reduce, self.capacity)
      self._num_chunks = schedule.num_chunks

  @property
  def group(self) -> process_group.ProcessGroup:
    """What links the workers now."""
    return self._queue.group

  def join(self) -> None:
    """Is called before what needs a group."""

  @property
  def rank(self):
    """See base class."""
    return self.group.rank

  @property
  def world_size(self):
    """See base class."""
    return self.group.world_size

  def all_reduce(self, columns, name, are_gradients=False):
    """See base class."""
    several = len(columns) > 1
    tensors = self._local.sum_on_first(columns) if several else columns[0]
    summed = self._all_reduce_host(
      tensors, 'all_reduce', name, are_gradients, columns[0]
    )
    return [summed] * len(columns)

  def all_reduce_replica(
    self, tensors, replica_id, options, are_gradients=False
  ):
    """See base class: through TensorFlow's collectives between local ones."""

    def all_reduce_locally(tensors):
      if self._local.num_replicas == 1:
        return tensors
      return self._local.all_reduce_replica(
        tf.distribute.ReduceOp.SUM, tensors, replica_id, options
      )

    tensors = all_reduce_locally(tensors)
    if replica_id == 0:
      tensors = self._all_reduce_host(
        tensors, 'all_reduce_in_control_flow', 'branch', are_gradients
      )
    else:
      # The group is called once a worker; this replica's share is in it.
      tensors = [tf.zeros_like(t) for t in tensors]
    return all_reduce_locally(tensors)

  def _all_reduce_host(self, tensors, kind, name, are_gradients, told_as=None):
    """Sums tensors of all workers; `told_as` are those that a timeline names."""
    told_as = tensors if told_as is None else told_as
    compression = self._options.compression if are_gradients else 'none'
    codec = codecs.get(compression)

    def bucket(index):
      def work(group, array):
        return group.all_reduce(
          array,
          name=f'{name}/bucket_{index}',
          algorithm=self._options.all_reduce,
          compression=compression,
        )

      return work

    # One copy from a GPU for each bucket, not for each gradient.
    device = self._local.devices[0]
    with tf.device(device):
      packed = reducer.pack(
        [_cast(t, codec) for t in tensors],
        self._options.bucket_bytes,
        block=codec.block_length or 1,
        num_chunks=self._num_chunks,
      )
      summed = packed.unpack(
        self._queue.call_all(
          kind,
          [bucket(i) for i in range(len(packed.buckets))],
          packed.buckets,
          [_names(told_as, members) for members in packed.members],
          device,
        )
      )
      return [tf.cast(s, t.dtype) for s, t in zip(summed, tensors, strict=True)]

  # For what is mixed in.
  _to_wire = staticmethod(lambda tensor, codec: _cast(tensor, codec))
  _names = staticmethod(lambda tensors, members: _names(tensors, members))

  def combine(self, tensor, op, name, is_report=False):
    """See base class."""

    def work(group, array):
      try:
        flat = group.all_reduce(np.ravel(array), op=op, name=name)
      except errors.Error:
        if not is_report:
          raise
        return array
      return np.reshape(flat, array.shape)

    with tf.device('CPU:0'):
      return self._queue.call(f'combine_{op}', work, tensor, tensor.shape)

  def all_gather(self, tensor, name):
    """See base class."""

    def work(group, array):
      return np.concatenate(group.all_gather(array, name=name))

    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])
    with tf.device('CPU:0'):
      return self._queue.call('all_gather', work, tensor, shape)

  def broadcast(self, tensor, root, name):
    """See base class."""

    def work(group, array):
      flat = np.ravel(array)
      return np.reshape(group.broadcast(flat, root, name=name), array.shape)

    with tf.device('CPU:0'):
      return self._queue.call('broadcast', work, tensor, tensor.shape)

  def exchange(self, tag, payload):
    """See base class."""
    return self.group.exchange(tag, payload)

  def agree(self, value, what):
    """See base class."""
    return self.group.agree(value, what=what)

  def report(self):
    """See base class: `link`, `paths`, `world_size`, `calls`, `bytes_sent`."""
    group = self.group
    return {
      'link': group.name,
      'paths': group.paths(),
      'rank': group.rank,
      'world_size': group.world_size,
      'generation': group.generation,
      'calls': dict(self._queue.calls),
      'bytes_sent': group.bytes_sent,
    }

  def close(self):
    """See base class."""
    self.group.close()
    self._queue.close()


class ElasticCommunicator(ProcessGroupCommunicator):
  """Workers that may change while graphs which call them live on.

  Graphs read at run time how many there are and which one this is. Until `enter`
  this worker is in no group; what needs one calls `join`, which enters one.

  Args:
    join: makes this worker a member of a group: calls `enter`.
    capacity: the most workers that a group can have.
    local, options: as of `ProcessGroupCommunicator`.
  """

  def __init__(
    self,
    join: Callable[[], None],
    capacity: int,
    local: reducer.DeviceReducer,
    options: options_lib.RingOptions,
  ):
    self._join, self._capacity = join, capacity
    super().__init__(None, local, options)
    with tf.init_scope(), tf.device('CPU:0'):
      # Of no strategy, as the queue's token.
      self._place = _tf_internal.ResourceVariable(
        np.int32([0, capacity]), trainable=False, name='place'
      )

  @property
  def capacity(self):
    """See base class."""
    return self._capacity

  @property
  def is_member(self) -> bool:
    """Whether this worker is in a group."""
    return self._queue.group is not None

  @property
  def group(self):
    """See base class; joins one first."""
    self.join()
    return self._queue.group

  def join(self) -> None:
    """Makes this worker a member, if it is in no group."""
    if not self.is_member:
      with tf.init_scope():
        self._join()

  def place(self) -> tuple[tf.Tensor, tf.Tensor]:
    """This worker's rank and the number of workers, int32, when a graph runs."""
    rank, world_size = tf.unstack(self._place.read_value())
    return rank, world_size

  def enter(self, group: process_group.ProcessGroup) -> None:
    """Uses this group from now on, in place of one that has ended."""
    self._queue.continue_in(group)
    self._place.assign(np.int32([group.rank, group.world_size]))

  def close(self):
    """See base class."""
    if self.is_member:
      self._queue.group.close()
    self._queue.close()


def _cast(tensor, codec):
  """A tensor in the dtype in which the group gets it."""
  if tensor.dtype == tf.bool:
    return tf.cast(tensor, tf.uint8)
  # Where a codec is a cast, TensorFlow makes it on all cores.
  if tensor.dtype == tf.float32 and codec.cast_dtype is not None:
    return tf.cast(tensor, codec.cast_dtype)
  return tensor


def _names(tensors, members) -> str:
  """What a bucket holds: variables whose gradients they are, or operations."""
  if tf.executing_eagerly():
    return ''
  names = [_tf_internal.label_of(tensors[i]) for i in members[:_NAMED]]
  more = len(members) - _NAMED
  return ', '.join(names) + (f' and {more} more' if more > 0 else '')
