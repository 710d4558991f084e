"""Counts the executions and bytes of a cross-device op inside the graph.

A Python counter would count the traces of a `tf.function`. These counters are
variables that the graph updates, so they count executions. They prove how often
our all-reduce ran, and how many bytes each device received.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tf_strategies import _tf_internal


class _Pause(threading.local):
  is_paused = False


_pause = _Pause()


@contextlib.contextmanager
def paused() -> Iterator[None]:
  """Pauses counting in this thread.

  It is for code that a SavedModel may contain. A function that updates one of
  our counters cannot be saved, because the loader does not have the counter.
  """
  before, _pause.is_paused = _pause.is_paused, True
  try:
    yield
  finally:
    _pause.is_paused = before


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

  def record(
    self, devices: Sequence[str], bytes_in: Sequence[int] = ()
  ) -> None:
    """Adds one execution to the counters, in the graph being built or now.

    `bytes_in` is the bytes that each device receives from the others, if they are
    counted. Tensors whose shape is unknown when the graph is built count as zero.
    Graphs of `tf.compat.v1.Session` are not counted, because each would need its own
    counter, which would not be initialised.
    """
    if _pause.is_paused:
      return
    devices = tuple(devices)
    with tf.init_scope(), tf.device('CPU:0'):
      if not tf.executing_eagerly():
        return
      if devices not in self._counters:
        # Created outside the function being traced. In a strategy's scope, a
        # `tf.Variable` would become a mirrored variable.
        self._counters[devices] = _tf_internal.ResourceVariable(
          [0] * (1 + len(bytes_in)), dtype=tf.int64, trainable=False
        )
    with tf.device('CPU:0'):
      self._counters[devices].assign_add(tf.constant([1, *bytes_in], tf.int64))

  @property
  def calls(self) -> int:
    """Returns how often the call was executed, over all device lists."""
    return sum(int(c.numpy()[0]) for c in self._counters.values())

  def bytes_in(self) -> dict[str, int]:
    """Returns the bytes that each device received over all executions."""
    total = {}
    for devices, counter in self._counters.items():
      for device, received in zip(devices, counter.numpy()[1:], strict=True):
        total[device] = total.get(device, 0) + int(received)
    return total
