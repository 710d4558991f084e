"""Counts what a cross-device op really did, inside the graph.

A Python counter would count the traces of a `tf.function`. These are variables
that the graph itself adds to, so they count executions: the proof that an
all-reduce of ours ran, how often, and how many bytes each device took in.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tf_strategies import _tf_internal


class _State(threading.local):
  is_paused = False


_state = _State()


@contextlib.contextmanager
def paused() -> Iterator[None]:
  """Counts nothing in this thread.

  For what a SavedModel may hold: its loader knows no counter of ours, so a
  function that adds to one cannot be saved.
  """
  before, _state.is_paused = _state.is_paused, True
  try:
    yield
  finally:
    _state.is_paused = before


class CallStatistics:
  """Executions and received bytes of one kind of call, per device list.

  Recording costs one assign-add of an int64 vector on the host for each call.

  Example:

    >>> statistics = CallStatistics()
    >>> statistics.record(['CPU:0', 'CPU:1'], bytes_in=[8, 8])
    >>> statistics.calls, statistics.bytes_in()
    (1, {'CPU:0': 8, 'CPU:1': 8})
  """

  def __init__(self):
    self._counters = {}

  def record(self, devices: Sequence[str], bytes_in: Sequence[int]) -> None:
    """Adds one execution to the counters, in the graph being built or now.

    `bytes_in` is what each device receives from the others; tensors whose shape
    is unknown when the graph is built count as zero. A graph of
    `tf.compat.v1.Session` counts nothing: each would need a counter of its own,
    which nobody initialises.
    """
    if _state.is_paused:
      return
    with tf.init_scope():
      if not tf.executing_eagerly():
        return
    devices = tuple(devices)
    if devices not in self._counters:
      # Lifted out of any function being traced, and not `tf.Variable`, whose
      # creator a strategy scope would replace by a mirrored one.
      with tf.init_scope(), tf.device('CPU:0'):
        self._counters[devices] = _tf_internal.ResourceVariable(
          [0] * (1 + len(devices)), dtype=tf.int64, trainable=False
        )
    with tf.device('CPU:0'):
      self._counters[devices].assign_add(tf.constant([1, *bytes_in], tf.int64))

  @property
  def calls(self) -> int:
    """Returns how often the call was executed, over all device lists."""
    return sum(int(c.numpy()[0]) for c in self._counters.values())

  def bytes_in(self) -> dict[str, int]:
    """Bytes that each device received over all executions."""
    total = {}
    for devices, counter in self._counters.items():
      for device, received in zip(devices, counter.numpy()[1:], strict=True):
        total[device] = total.get(device, 0) + int(received)
    return total
