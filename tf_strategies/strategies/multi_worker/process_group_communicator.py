"""Links workers by a process group: host calls in one order.

All buckets of a step are handed over together, so that one call waits for all of
them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal, process_group
from tf_strategies.cross_device import packing
from tf_strategies.spmd import pieces
from tf_strategies.spmd.site import at_each
from tf_strategies.strategies import communicator
from tf_strategies.strategies.multi_worker import collective_queue
from tf_strategies.strategies.multi_worker import options as options_lib

# How many of a bucket's tensors a timeline spells out.
_NAMED = 6


class ProcessGroupCommunicator(communicator.Communicator):
  """Reduces local devices in the graph, and workers by host calls.

  Workers may change while graphs that call them live on. Such graphs read at run time
  how many workers there are. A worker that is in no group joins one when it needs it.

  Args:
    group: the group of the workers; None before the first one.
    devices: devices of this worker.
    local_ops: reduces tensors between them.
    options: how workers communicate.
    membership: the `elastic_members.Members` that forms the groups; None if `group`
      never changes.
  """

  def __init__(
    self,
    group: process_group.ProcessGroup | None,
    devices: Sequence[str],
    local_ops: tf.distribute.CrossDeviceOps,
    options: options_lib.RingOptions,
    membership: Any = None,
  ):
    super().__init__(devices)
    self.membership = membership
    self.is_elastic = membership is not None
    if self.is_elastic:  # It says who is wrong.
      self.check_same = membership.check_same
    self._queue = collective_queue.CollectiveQueue(group, self.join_group)
    with tf.init_scope(), tf.device('CPU:0'):
      # Rank and number of workers, for graphs. Of no strategy, as the queue's token.
      self.place = _tf_internal.ResourceVariable(
        np.int32([0, self.capacity]), trainable=False, name='place'
      )
    self._local_ops, self._options = local_ops, options

  @property
  def is_member(self) -> bool:
    """Returns whether this worker is in a group."""
    return self._queue.group is not None

  def join_group(self) -> None:
    """Makes this worker a member of a group, if it is in none."""
    if not self.is_member:
      with tf.init_scope():
        self.membership.enter()

  def enter(self, group: process_group.ProcessGroup) -> None:
    """Uses this group from now on, in place of one that has ended."""
    self._queue.continue_in(group)
    self.place.assign(np.int32([group.rank, group.world_size]))

  @property
  def group(self) -> process_group.ProcessGroup:
    """Returns the current process group of the workers; joins one first."""
    self.join_group()
    return self._queue.group

  @property
  def rank(self):
    """See base class."""
    return self.group.rank

  @property
  def world_size(self):
    """See base class."""
    return self.group.world_size

  @property
  def capacity(self):
    """See base class."""
    return self.membership.capacity if self.is_elastic else self.world_size

  def all_reduce(self, columns, name, gradients=()):
    """See base class."""
    tensors = self._sum_on_first(columns)
    are_gradients = [g is not None for g in gradients] or [False] * len(tensors)
    # One copy from a GPU for each bucket, not for each gradient.
    with tf.device(self._devices[0]):
      wires = list(map(self._to_wire, tensors, are_gradients))
      names = _names(tensors, gradients)
      algorithm = self._options.all_reduce
      sums = self._send('all_reduce', name, wires, names, algorithm=algorithm)
      summed = [tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)]
    return [summed] * len(columns)

  def _sum_on_first(self, columns):
    """Sums columns of tensors, one for each device, on the first device."""
    if len(columns) == 1:
      return columns[0]
    pairs = [
      (_tf_internal.PerReplica(row), self._devices[0])
      for row in zip(*columns, strict=True)
    ]
    return self._local_ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)

  def _send(
    self, kind, name, tensors, names, rows_sent=None, rows_got=None, **how
  ):
    """Has the group do its work with buckets of tensors.

    Args:
      kind: method of the group.
      name: name of the tensors, for messages.
      tensors: the tensors to send.
      names: names of the tensors in a timeline.
      rows_sent: number of rows of each tensor if they are matrices, as all workers
        have them together.
      rows_got: number of rows of the results.
      **how: other arguments of the method.

    Returns:
      The results, on the first device.
    """
    packed = packing.pack(
      tensors, self._options.bucket_bytes, num_rows=rows_sent
    )

    def work(group, array, bucket):
      return getattr(group, kind)(array, name=f'{name}/bucket_{bucket}', **how)

    requests = [
      collective_queue.QueuedWork(
        functools.partial(work, bucket=i), bucket, _contents(names, members)
      )
      for i, (bucket, members) in enumerate(
        zip(packed.buckets, packed.members, strict=True)
      )
    ]
    results = []
    if requests:
      results = self._queue.call_all(kind, requests, self._devices[0])
    return packed.unpack(results, rows_got)

  # Pieces are in the order of replicas: those of one worker's devices lie behind
  # each other. A reduce-scatter and an all-gather send as much as an all-reduce.

  def scatter(self, columns, shard, sites, are_gradients):
    """See base class. None of the pieces is there before all are."""
    del sites
    count, tensors = len(columns), self._sum_on_first(columns)
    with tf.device(self._devices[0]):
      wires = [self._to_wire(t, are_gradients) for t in tensors]
      rows = [pieces.rows(t, shard) for t in wires]
      matrices = self._send(
        'reduce_scatter',
        'pieces',
        rows,
        _names(tensors),
        shard.count,
        count,
        algorithm=self._options.all_reduce,
      )
    mine = []
    for i, device in enumerate(self._devices):
      with tf.device(device):
        mine.append(
          [
            tf.cast(m[i], t.dtype)
            for m, t in zip(matrices, tensors, strict=True)
          ]
        )
    return mine

  def join(self, columns, shapes, sites):
    """See base class."""
    count = len(columns) * self.world_size
    with tf.device(self._devices[0]):
      rows = [
        row[0][None] if len(row) == 1 else tf.stack(row)
        for row in zip(*columns, strict=True)
      ]
      names = _names(columns[0])
      whole = self._send(
        'all_gather', 'pieces', rows, names, count, count, are_equal=True
      )
    return at_each(sites, lambda _: list(map(pieces.joined, whole, shapes)))

  def _to_wire(self, tensor: tf.Tensor, is_gradient: bool) -> tf.Tensor:
    """Returns a tensor in the dtype in which it travels."""
    compression = self._options.compression
    is_wide = tensor.dtype in (tf.float32, tf.float64)
    if is_gradient and is_wide and compression != 'none':
      return tf.cast(tensor, compression)
    return tensor

  def sum(self, tensor, name):
    """See base class."""
    return self._call(
      'sum',
      tensor,
      tensor.shape,
      lambda group, array: np.reshape(
        group.all_reduce(np.ravel(array), name=name), array.shape
      ),
    )

  def all_gather(self, tensor, name):
    """See base class."""
    return self._call(
      'all_gather',
      tensor,
      tf.TensorShape([None, *tensor.shape[1:]]),
      lambda group, array: group.all_gather(array, name=name),
    )

  def from_chief(self, tensor, name):
    """See base class."""
    return self._call(
      'broadcast',
      tensor,
      tensor.shape,
      lambda group, array: group.broadcast(array, 0, name=name),
    )

  def _call(self, kind, tensor, shape, work):
    with tf.device('CPU:0'):
      return self._queue.call(kind, work, tensor, shape)

  def exchange(self, tag, value):
    """See base class."""
    return self.group.exchange(tag, value)

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
    if self.is_member:
      self._queue.group.close()
    self._queue.close()


def _names(tensors, gradients=()) -> list[str]:
  """Returns the names of the variables of gradients, or of other operations."""
  if tf.executing_eagerly():
    return [''] * len(tensors)
  pairs = itertools.zip_longest(tensors, gradients)
  return [variable or tensor.op.name for tensor, variable in pairs]


def _contents(names, members) -> str:
  """Returns what a bucket holds."""
  more = len(members) - _NAMED
  told = ', '.join(names[i] for i in members[:_NAMED])
  return told + (f' and {more} more' if more > 0 else '')
