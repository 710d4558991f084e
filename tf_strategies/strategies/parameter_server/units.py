"""What a step writes on a server, as calls there that are made once.

Each call begins when all that it needs has arrived, and then depends on nobody else:
the death of the worker does not end it. `journal` says whether it is to write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_strategies import _tf_internal

# The number of a step's last unit, which is on server 0.
LAST_UNIT = 0


class Ticket(NamedTuple):
  """What a step shows to a server before it writes there."""

  tensor: tf.Tensor
  # On a server, in the graph: whether a unit of that number is to be written; of a
  # copy of the tensor. Fails if the worker was given up.
  admit: Callable[[tf.Tensor, int, int | None], tf.Tensor]
  device: Callable[[int], str]  # Of a server.


class Units:
  """The units of one step, numbered as they are traced."""

  def __init__(self):
    self.is_open = False  # Whether one is being traced.
    self._count = LAST_UNIT

  def write(
    self,
    ticket: Ticket,
    server: int,
    write: Callable[[], Any],
    step: tf.Graph,
    tensor: tf.Tensor,
    is_last: bool,
  ) -> tf.Operation:
    """Writes on a server: once, or not if the worker was given up.

    Args:
      ticket: of the step.
      server: on which it is written.
      write: does it; it is traced in a function of its own.
      step: the graph of the step.
      tensor: a copy of the ticket's.
      is_last: whether nothing is written after it.

    Returns:
      The op after which it is written.
    """
    number = None
    if is_last:
      number = LAST_UNIT
    elif _tf_internal.runs_once(tf.compat.v1.get_default_graph(), step):
      self._count += 1
      number = self._count

    def write_in_branch():
      write()
      return 1

    def write_if_admitted():
      is_to_write = ticket.admit(tensor, server, number)
      return tf.cond(is_to_write, write_in_branch, lambda: 1)

    self.is_open = True
    try:
      with tf.device(ticket.device(server)):
        return _as_one_call(write_if_admitted)().op
    finally:
      self.is_open = False


def _as_one_call(function: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
  """A function that begins when all of its inputs are there, and ends.

  As operations of the step they would begin with some inputs; and those that were
  noted as written might not run when another operation of the step fails.
  """
  return tf.function(
    function, autograph=False, experimental_attributes={'_noinline': True}
  )
