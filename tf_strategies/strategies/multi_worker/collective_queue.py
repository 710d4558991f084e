"""Collectives of a process group as TensorFlow ops: host calls in one order.

All ranks must issue their collectives in the same order. TensorFlow keeps the
order of host calls within one function only, so that a `tf.while_loop` or a
`tf.cond` may overtake another. Here each call reads a token variable and
writes it back: TensorFlow never reorders that.

Calls that move gradients come in two parts. The first hands a tensor to a
thread of this ring and returns at once; the second waits for all results. So
the reduction of the last layers' gradients runs while the backward pass
computes those of the first layers, and no thread of TensorFlow waits for it.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_strategies import _graph_errors, _tf_internal, errors, process_group
from tf_strategies.monitoring import recorder

# Of collectives that gradients go through, for the timeline.
_UPDATES = itertools.count()


class CollectiveQueue:
  """A process group that graphs can call.

  Args:
    group: the process group; `reset` replaces it.
  """

  def __init__(self, group: process_group.ProcessGroup):
    self._group = group
    self._thread = _new_thread()
    self._handles = itertools.count()
    self._pending: dict[int, concurrent.futures.Future] = {}
    self._lock = threading.Lock()
    self._update = 0
    self.calls: dict[str, int] = {}
    with tf.init_scope(), tf.device('CPU:0'):
      # Of no strategy: a mirrored variable would be updated by collectives.
      self._token = _tf_internal.ResourceVariable(
        np.int64(0), trainable=False, name='collective_order'
      )

  @property
  def group(self) -> process_group.ProcessGroup:
    """The group that calls go to now."""
    return self._group

  def reset(self, group: process_group.ProcessGroup) -> None:
    """Lets the same graphs call another group from now on."""
    self.close()
    with self._lock:
      self._group = group
      self._thread = _new_thread()
      self._pending.clear()

  def close(self) -> None:
    """Ends the thread; the group must have been closed or have failed."""
    self._thread.shutdown(wait=False, cancel_futures=True)

  # What graphs and eager code call.

  def call(
    self,
    kind: str,
    work: Callable[..., np.ndarray],
    tensor: tf.Tensor,
    shape: tf.TensorShape,
  ) -> tf.Tensor:
    """Runs `work(group, array)` in order and returns what it returns.

    Args:
      kind: of the collective, for the statistics.
      work: makes an array of the tensor's dtype; runs in this ring's thread.
      tensor: what `work` gets, as an array.
      shape: of the result, as far as it is known.
    """
    if tf.executing_eagerly():
      result = self._run(kind, work, tensor.numpy())
      return tf.constant(result, tensor.dtype)
    self._check_not_compiled(kind)

    def host(array, token):
      return self._guard(lambda: (self._run(kind, work, array), token + 1))

    result = self._in_order(host, [tensor], [tensor.dtype])[0]
    result.set_shape(shape)
    return result

  def call_all(
    self,
    kind: str,
    work: Callable[..., np.ndarray],
    tensors: Sequence[tf.Tensor],
    contents: Sequence[str] = (),
  ) -> list[tf.Tensor]:
    """Runs `work(group, index, array)` for each tensor as it becomes ready.

    Args:
      kind: of the collectives, for the statistics.
      work: makes an array like the one that it gets; runs in this ring's
        thread, in the order of the tensors.
      tensors: one-dimensional, in the order in which they become ready.
      contents: what is in each of them, for the timeline.

    Returns:
      The results, none before all are there: what follows happens with all of
      them or not at all.
    """
    if tf.executing_eagerly():
      return [
        tf.constant(
          self._run(kind, lambda g, a, i=i: work(g, i, a), t.numpy()), t.dtype
        )
        for i, t in enumerate(tensors)
      ]
    self._check_not_compiled(kind)
    contents = contents or [''] * len(tensors)
    handles = [
      self._start(
        kind, lambda g, a, i=i: work(g, i, a), tensor, i == 0, contents[i]
      )
      for i, tensor in enumerate(tensors)
    ]

    def wait(handles, token):
      return self._guard(lambda: (*self._wait(handles), token + 1))

    results = self._in_order(
      wait, [tf.stack(handles)], [t.dtype for t in tensors]
    )
    for result, tensor in zip(results, tensors, strict=True):
      result.set_shape(tensor.shape)
    return results

  # The graph's side.

  def _start(self, kind, work, tensor, is_first, contents):
    def host(array, token):
      def start():
        handle = next(self._handles)
        if is_first:
          self._update = next(_UPDATES)
        self._pending[handle] = self._submit(
          kind, work, array, update=self._update, contents=contents
        )
        return np.int64(handle), token + 1

      return self._guard(start)

    return self._in_order(host, [tensor], [tf.int64], [[]])[0]

  def _in_order(self, host, inputs, dtypes, shapes=None):
    """A host call between a read and a write of the token."""
    with tf.device('CPU:0'):
      *results, token = tf.numpy_function(
        host, [*inputs, self._token.read_value()], [*dtypes, tf.int64]
      )
      token.set_shape([])
      with tf.control_dependencies([self._token.assign(token)]):
        results = [tf.identity(r) for r in results]
    for result, shape in zip(results, shapes or (), strict=False):
      result.set_shape(shape)
    return results

  def _check_not_compiled(self, kind):
    if _tf_internal.in_xla_context():
      raise errors.UnsupportedOptionError(
        f'jit_compile=True around a collective between workers ({kind})',
        'steps that XLA does not compile: it cannot call the network',
        'compile(..., jit_compile=False), or compile functions inside of the '
        'step that do not synchronise',
      )

  # The host's side.

  def _submit(self, kind, work, array, **about):
    group = self._group
    if recorder.is_on():
      work = _recorded(kind, work, handed_ns=recorder.now(), **about)
    with self._lock:
      self.calls[kind] = self.calls.get(kind, 0) + 1
      return self._thread.submit(work, group, array)

  def _run(self, kind, work, array):
    with recorder.span(f'wait for {kind}', recorder.WAIT):
      return self._submit(kind, work, array).result()

  def _wait(self, handles):
    futures = [self._pending.pop(int(handle)) for handle in handles]
    with recorder.span('wait for buckets', recorder.WAIT):
      return [future.result() for future in futures]

  def _guard(self, function):
    """Lets a failure leave the graph with its type."""
    try:
      return function()
    except errors.Error as e:
      _graph_errors.raise_through_graph(e)
    except (RuntimeError, KeyError, concurrent.futures.CancelledError) as e:
      # The ring was closed under a graph that still ran.
      failure = self._group.failure
      if failure is None:
        raise
      _graph_errors.raise_through_graph(failure)
      raise AssertionError from e


def _new_thread():
  return concurrent.futures.ThreadPoolExecutor(1, 'collectives')


def _recorded(kind, work, **about):
  """Work that also tells the recorder when it ran, and what it sent."""

  def run(group, array):
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
        generation=group.generation,
        sequence=position['sequence'],
        failed=failed,
        **about,
      )

  return run
