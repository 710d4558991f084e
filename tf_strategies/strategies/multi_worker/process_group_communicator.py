"""Workers that are linked by a process group of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import collectives, errors, process_group
from tf_strategies.strategies import communicator
from tf_strategies.strategies.mirrored import reducer
from tf_strategies.strategies.multi_worker import buckets as buckets_lib
from tf_strategies.strategies.multi_worker import collective_queue

# A message costs about as much as copying so many bytes into a bucket.
_ALONE_BYTES = 1 << 20
# How many of a bucket's tensors a timeline spells out.
_NAMED = 6


class ProcessGroupCommunicator(communicator.Communicator):
  """Local devices are reduced in the graph, workers by host calls.

  Args:
    group: the process group.
    local: what adds up tensors of the local devices.
    bucket_bytes: the most that a bucket of small tensors holds.
    all_reduce: name of the algorithm between workers, or 'auto'.
    compression: name of the codec in which gradients travel.
  """

  def __init__(
    self,
    group: process_group.ProcessGroup,
    local: reducer.DeviceReducer,
    bucket_bytes: int,
    all_reduce: str = 'auto',
    compression: str = 'none',
  ):
    self._ring = collective_queue.CollectiveQueue(group)
    self._local = local
    self._bucket_bytes = bucket_bytes
    self._how = {'algorithm': all_reduce, 'compression': compression}
    # Where a codec is a cast, TensorFlow makes it on all cores.
    self._cast_dtype = collectives.CODECS[compression].cast_dtype

  @property
  def group(self) -> process_group.ProcessGroup:
    """The process group that links the workers now."""
    return self._ring.group

  @property
  def rank(self) -> int:
    """See base class."""
    return self.group.rank

  @property
  def world_size(self) -> int:
    """See base class."""
    return self.group.world_size

  def reset(self, group: process_group.ProcessGroup) -> None:
    """Goes on with another group; graphs that know 1/N are stale then."""
    self._ring.reset(group)

  def all_reduce(self, columns, name):
    """See base class."""
    several = len(columns) > 1
    tensors = self._local.sum_on_first(columns) if several else columns[0]
    summed = self._all_reduce_host(tensors, 'all_reduce', name)
    return [summed] * len(columns)

  def all_reduce_replica(self, tensors, replica_id, options):
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
        tensors, 'all_reduce_in_control_flow', 'branch'
      )
    else:
      # The ring is called once a worker; this replica's share is in it.
      tensors = [tf.zeros_like(t) for t in tensors]
    return all_reduce_locally(tensors)

  def _all_reduce_host(self, tensors, kind, name):
    with tf.device('CPU:0'):
      sent = [self._cast(t) for t in tensors]
      packed = buckets_lib.pack(
        sent, [t.dtype.name for t in sent], self._bucket_bytes, _ALONE_BYTES
      )

      def reduce(group, index, array):
        return group.all_reduce(
          array, name=f'{name}/bucket_{index}', **self._how
        )

      contents = [_names(tensors, members) for members in packed.members]
      summed = packed.unpack(
        self._ring.call_all(kind, reduce, packed.buckets, contents)
      )
      return [tf.cast(s, t.dtype) for s, t in zip(summed, tensors, strict=True)]

  def _cast(self, tensor):
    """A tensor in the dtype in which the group gets it."""
    if tensor.dtype == tf.bool:
      return tf.cast(tensor, tf.uint8)
    if tensor.dtype == tf.float32 and self._cast_dtype is not None:
      return tf.cast(tensor, self._cast_dtype)
    return tensor

  def combine(self, tensor, op, name, is_report=False):
    """See base class."""

    def reduce(group, array):
      try:
        flat = group.all_reduce(np.ravel(array), op=op, name=name)
      except errors.Error:
        if not is_report:
          raise
        return array
      return np.reshape(flat, array.shape)

    with tf.device('CPU:0'):
      return self._ring.call(f'combine_{op}', reduce, tensor, tensor.shape)

  def all_gather(self, tensor, name):
    """See base class."""

    def gather(group, array):
      return np.concatenate(group.all_gather(array, name=name))

    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])
    with tf.device('CPU:0'):
      return self._ring.call('all_gather', gather, tensor, shape)

  def broadcast(self, tensor, root, name):
    """See base class."""

    def send(group, array):
      flat = np.ravel(array)
      return np.reshape(group.broadcast(flat, root, name=name), array.shape)

    with tf.device('CPU:0'):
      return self._ring.call('broadcast', send, tensor, tensor.shape)

  def exchange(self, tag, payload):
    """See base class."""
    return self.group.exchange(tag, payload)

  def agree(self, value: Any, what: str) -> Any:
    """See base class."""
    return self.group.agree(value, what=what)

  def report(self):
    """See base class: `link`, `world_size`, `calls`, `bytes_sent`."""
    return {
      'link': self.group.name,
      'rank': self.rank,
      'world_size': self.world_size,
      'generation': self.group.generation,
      'calls': dict(self._ring.calls),
      'bytes_sent': self.group.bytes_sent,
    }

  def close(self):
    """See base class."""
    self.group.close()
    self._ring.close()


def _names(tensors, members) -> str:
  """What a bucket holds, as the graph calls it."""
  if tf.executing_eagerly():
    return ''
  names = [_source(tensors[i].op).name for i in members[:_NAMED]]
  more = len(members) - _NAMED
  return ', '.join(names) + (f' and {more} more' if more > 0 else '')


def _source(op):
  """The op that computes what identities and casts hand on."""
  while op.type in ('Identity', 'Cast', 'Reshape'):
    op = op.inputs[0].op
  return op
