"""The collectives of a process group as TensorFlow ops, in one order.

All ranks must issue their collectives in the same order. TensorFlow keeps the
order of host calls within one function only, so that a `tf.while_loop` or a
`tf.cond` may overtake another. Here each call reads a token variable and
writes it back: TensorFlow never reorders these operations.

Calls that move gradients come in two parts. The first hands a tensor to a
thread and returns at once. The second waits for all results. So the gradients of the
last layers are reduced while the backward pass computes the gradients of the first
layers, and no thread of TensorFlow waits for them.
"""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_strategies import (
  _graph_errors,
  _keras_internal,
  _tf_internal,
  errors,
  process_group,
)
from tf_strategies.monitoring import recorder
from tf_strategies.strategies import communicator

# A collective on an array, which returns an array of the same dtype.
_Work = Callable[[process_group.ProcessGroup, np.ndarray], np.ndarray]


class QueuedWork(NamedTuple):
  """A tensor, and the work that a group does with it.

  Attributes:
    work: function of a group and an array that returns an array of the same dtype.
    tensor: a one-dimensional tensor.
    contents: names of the tensor's contents, for the timeline.
  """

  work: _Work
  tensor: tf.Tensor
  contents: str


class CollectiveQueue:
  """The collectives of a process group as TensorFlow ops, in program order.

  `join` is called before a collective that runs outside of graphs.
  """

  def __init__(
    self,
    group: process_group.ProcessGroup | None,
    join: Callable[[], None] = lambda: None,
  ):
    self._use(group)
    self._join = join
    self._handles = itertools.count()
    self._pending: dict[int, concurrent.futures.Future] = {}
    # The number of the update whose gradients travel, for the timeline.
    self._update = 0
    self.calls: collections.Counter[str] = collections.Counter()
    with tf.init_scope(), tf.device('CPU:0'):
      # It belongs to no strategy. A mirrored variable would be updated by
      # collectives.
      self._token = _tf_internal.ResourceVariable(
        np.int64(0), trainable=False, name='collective_order'
      )

  def close(self) -> None:
    """Ends the thread; the group must have been closed or have failed."""
    self._thread.shutdown(wait=False, cancel_futures=True)

  def continue_in(self, group: process_group.ProcessGroup) -> None:
    """Runs later collectives in another group, also those of existing graphs.

    The previous group must be closed. Calls that wait in it fail at once.
    """
    self._thread.shutdown(wait=True, cancel_futures=True)
    self._pending.clear()
    self._use(group)

  def _use(self, group: process_group.ProcessGroup | None) -> None:
    if group is not None:
      group.name_calls_by(_keras_internal.noted_call)
    self.group = group
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'collectives')

  # Methods for graphs and eager code. `kind` is for the statistics.

  def call(
    self,
    kind: str,
    work: _Work,
    tensor: tf.Tensor,
    shape: tf.TensorShape | None = None,
  ) -> tf.Tensor:
    """Runs `work` in order. Returns its result, with the known static shape."""
    if tf.executing_eagerly():
      self._join()
      result = self._run(kind, work, tensor.numpy())
      return tf.constant(result, tensor.dtype)
    communicator.check_not_compiled(kind)
    [result] = self._in_order(
      lambda array: [self._run(kind, work, array)], [tensor], [tensor.dtype]
    )
    result.set_shape(shape)
    return result

  def call_all(
    self, kind: str, requests: Sequence[QueuedWork], device: str
  ) -> list[tf.Tensor]:
    """Does the work of each request as soon as its tensor is ready.

    Args:
      kind: kind of the collectives.
      requests: at least one request, in the order in which the tensors become ready.
      device: device of the tensors. If it has memory of its own, a result is copied to
        it while others still travel.

    Returns:
      The results on that device, in a graph of unknown shape. All are ready at once, so
      the operations after them run with all results or not at all.
    """
    if tf.executing_eagerly():
      return [self.call(kind, r.work, r.tensor) for r in requests]
    communicator.check_not_compiled(kind)
    handles = [
      self._start(kind, request, is_first=i == 0)
      for i, request in enumerate(requests)
    ]
    is_host = device == _tf_internal.host_of(device)
    count = len(handles) if is_host else 1
    results = []
    for i in range(0, len(handles), count):
      with tf.device('CPU:0'):
        some = tf.stack(handles[i : i + count])
      dtypes = [r.tensor.dtype for r in requests[i : i + count]]
      results += self._in_order(self._wait, [some], dtypes)
    if count == len(handles):
      return results
    with tf.device(device):
      copies = [tf.identity(r) for r in results]
      with tf.control_dependencies(copies):
        return [tf.identity(c) for c in copies]

  # The graph's side.

  def _start(self, kind, request, is_first):
    """Hands a tensor to the thread. Returns the number of its result."""

    def host(array):
      handle = next(self._handles)
      self._update += is_first
      about = {'update': self._update, 'contents': request.contents}
      self._pending[handle] = self._submit(kind, request.work, array, **about)
      return [np.int64(handle)]

    [handle] = self._in_order(host, [request.tensor], [tf.int64])
    handle.set_shape([])
    return handle

  def _in_order(self, host, inputs, dtypes):
    """Makes a host call between a read and a write of the token.

    `host` takes arrays and returns a list of arrays, of these `dtypes`.
    """

    def call(*arrays):
      *arrays, token = arrays
      with _graph_errors.typed():
        return *host(*arrays), token + 1

    with tf.device('CPU:0'):
      *results, token = tf.numpy_function(
        call, [*inputs, self._token.read_value()], [*dtypes, tf.int64]
      )
      token.set_shape([])
      with tf.control_dependencies([self._token.assign(token)]):
        return [tf.identity(r) for r in results]

  # The host's side.

  def _submit(self, kind, work, array, **about):
    if recorder.is_on():
      work = _recorded(kind, work, handed_ns=recorder.now(), **about)
    self.calls[kind] += 1
    try:
      return self._thread.submit(work, self.group, array)
    except RuntimeError as e:
      raise self._closed() from e

  def _run(self, kind, work, array):
    with recorder.span(f'wait for {kind}', recorder.WAIT):
      return self._result(self._submit(kind, work, array))

  def _wait(self, handles):
    futures = [self._pending.pop(int(handle)) for handle in handles]
    with recorder.span('wait for buckets', recorder.WAIT):
      return list(map(self._result, futures))

  def _result(self, future):
    try:
      return errors.result_of(future)
    except concurrent.futures.CancelledError:
      # The queue was closed while a graph was running.
      raise self._closed() from None

  def _closed(self):
    """Returns why the thread takes nothing: the failure of the group, if it failed."""
    return self.group.failure or errors.WorkerUnavailableError(
      'This process has closed its group. Fix: form a new one.'
    )


def _recorded(kind, work, **about):
  """Returns `work` with a record of its time and of the bytes that it sent."""

  def run(group, array):
    """Runs the work and records it, even if it fails."""
    before, began = group.bytes_sent, recorder.now()
    failed = True
    try:
      result = work(group, array)
      failed = False
      return result
    finally:
      ended, position = recorder.now(), group.describe()
      recorder.add(
        position['name'] or kind,
        recorder.COMMUNICATION,
        began,
        ended,
        kind=kind,
        bytes=int(array.nbytes),
        sent=group.bytes_sent - before,
        sequence=position['sequence'],
        failed=failed,
        **about,
      )

  return run
