"""What a step writes on a server, as calls there that are made once.

Each call begins when all that it needs has arrived, and then depends on nobody else:
the death of the worker does not end it. `journal` says whether it is to write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from tf_strategies import _tf_internal

# The number of a step's last unit, which is on server 0.
LAST_UNIT = 0
# That wait for one lock: more than there are workers.
_MOST_WAITING = 4096


class Ticket(NamedTuple):
  """What a step shows to a server before it writes there."""

  tensor: tf.Tensor
  # On a server, in the graph: whether a unit of that number, which a step may come to
  # more than once or not, is to be written; of a copy of the tensor. Fails if the
  # worker was given up.
  admit: Callable[[tf.Tensor, int, int, bool], tf.Tensor]
  # What the first attempt at the step gave it, int64 [n].
  remember: Callable[[tf.Tensor], tf.Tensor]
  device: Callable[[int], str]  # Of a server.


@runtime_checkable
class Lock(Protocol):
  """Something on a server that one unit at a time may write."""

  key: str  # Of no other.

  def locked(self) -> contextlib.AbstractContextManager[list[tf.Operation]]:
    """Keeps others out until the ops are done that the body adds to the list."""


class LockedWrite(NamedTuple):
  """A write that reads and writes under a lock.

  Only `compute` may have loops. TensorFlow ends loops with the worker's call, and then
  nothing is noted or written.
  """

  lock: Lock
  compute: Callable[[], Any]  # Tensors, for `write`.
  write: Callable[[Any], list[tf.Operation]]  # Returns what writes.

  def do(self) -> None:
    """Writes here."""
    with self.lock.locked() as written:
      written += self.write(self.compute())


class Units:
  """The units of one step, numbered in the order of tracing."""

  def __init__(self):
    self._caller: tf.Graph | None = None  # Of the one that is being traced.
    self._count = LAST_UNIT

  @property
  def is_open(self) -> bool:
    """Returns whether one is being traced."""
    return self._caller is not None

  def before(self, device: str, read: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Reads on a device before the unit that is being traced."""
    with self._caller.as_default(), tf.device(device):
      return read()

  def write(
    self,
    ticket: Ticket,
    server: int,
    write: Callable[[], Any] | LockedWrite,
    step: tf.Graph,
    tensor: tf.Tensor,
    is_last: bool,
  ) -> tf.Operation:
    """Writes on a server: once, or not if the worker was given up.

    Args:
      ticket: of the step.
      server: on which it is written.
      write: does it; it is traced in a function of its own. Those with the same lock
        come one after another; the end of the worker's call ends the wait.
      step: the graph of the step.
      tensor: a copy of the ticket's.
      is_last: whether nothing is written after it.

    Returns:
      The op after which it is written.
    """
    number = LAST_UNIT
    if not is_last:
      self._count += 1
      number = self._count
    graph = tf.compat.v1.get_default_graph()
    is_repeated = not _tf_internal.runs_once(graph, step)

    def if_admitted(write):
      def write_in_branch():
        write()
        return 1

      is_to_write = ticket.admit(tensor, server, number, is_repeated)
      return tf.cond(is_to_write, write_in_branch, lambda: 1)

    def unit():
      if not isinstance(write, LockedWrite):
        return if_admitted(write)
      return _in_turn(lambda: locked(*write), write.lock.key)

    def locked(lock, compute, write):
      with lock.locked() as written:
        computed = compute()
        with tf.control_dependencies(tf.nest.flatten(computed)):
          done = if_admitted(lambda: write(computed))
        written.append(done.op)
      return done

    self._caller = tf.compat.v1.get_default_graph()
    try:
      with tf.device(ticket.device(server)):
        return _as_one_call(unit)().op
    finally:
      self._caller = None


def _as_one_call(function: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
  """A function that begins when all of its inputs are there, and ends.

  As operations of the step they would begin with some inputs; and those that were
  noted as written might not run when another operation of the step fails.
  """
  call = tf.function(
    function, autograph=False, experimental_attributes={'_noinline': True}
  )
  # What a step calls as a `tf.function` is a part of the step.
  return call.get_concrete_function()


def _in_turn(function: Callable[[], tf.Tensor], key: str) -> tf.Tensor:
  """Calls a function so that calls with the same key on a server do not overlap.

  TensorFlow's mutex is unsuitable: a cancelled wait unlocks it, even if another call
  holds it. Here one thread takes calls from a queue. A call that is cancelled before
  its turn does not begin. A call that has begun completes, except for its loops
  (`tf.while_loop`), which TensorFlow ends when the call is cancelled.
  """

  def call(one):
    with tf.control_dependencies([one]):
      return tf.reshape(function(), [1])

  spec = tf.TensorSpec([None], tf.int32)
  concrete = tf.function(call, autograph=False).get_concrete_function(spec)
  [done] = tf.raw_ops.BatchFunction(
    in_tensors=[tf.ones([1], tf.int32)],
    captured_tensors=concrete.captured_inputs,
    f=concrete,
    num_batch_threads=1,
    max_batch_size=1,
    allowed_batch_sizes=[1],
    batch_timeout_micros=0,
    max_enqueued_batches=_MOST_WAITING,
    shared_name=key,
    Tout=[tf.int32],
  )
  # To TensorFlow a batch has no effects: without this it would be left out.
  tf.debugging.Assert(tf.reduce_all(done > 0), [done])
  return done
