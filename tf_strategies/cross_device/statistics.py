"""Counts the executions and bytes of a cross-device op inside the graph.

A Python counter would count the traces of a `tf.function`. These counters are
variables that the graph updates, so they count executions. They prove how often
our all-reduce ran, and how many bytes each device received.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tf_strategies import _tf_internal


class _Recording(threading.local):
  is_paused = False
  # Of `together`: its graph, and the counts by statistics and devices.
  graph: tf.Graph | None = None
  counts: dict[tuple[CallStatistics, tuple[str, ...]], np.ndarray] | None = None


_recording = _Recording()


@contextlib.contextmanager
def paused() -> Iterator[None]:
  """Pauses counting in this thread.

  It is for code that a SavedModel may contain. A function that updates one of
  our counters cannot be saved, because the loader does not have the counter.
  """
  before, _recording.is_paused = _recording.is_paused, True
  try:
    yield
  finally:
    _recording.is_paused = before


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Counts all calls of the graph by one operation at the end of the context.

  Calls in branches and loops are counted there.
  """
  before = _recording.graph, _recording.counts
  _recording.graph = tf.compat.v1.get_default_graph()
  _recording.counts = counts = {}
  try:
    yield
  finally:
    _recording.graph, _recording.counts = before
  for (statistics, devices), count in counts.items():
    statistics._add(devices, count)  # pylint: disable=protected-access


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

    `bytes_in` is the bytes that each device receives from the others. Tensors whose
    shape is unknown when the graph is built count as zero. Graphs of
    `tf.compat.v1.Session` are not counted, because each would need its own counter,
    which would not be initialised.
    """
    if _recording.is_paused:
      return
    with tf.init_scope():
      if not tf.executing_eagerly():
        return
    devices = tuple(devices)
    if devices not in self._counters:
      # Created outside the function being traced. In a strategy's scope, a
      # `tf.Variable` would become a mirrored variable.
      with tf.init_scope(), tf.device('CPU:0'):
        self._counters[devices] = _tf_internal.ResourceVariable(
          [0] * (1 + len(devices)), dtype=tf.int64, trainable=False
        )
    count, key = np.array([1, *bytes_in]), (self, devices)
    if _recording.graph is tf.compat.v1.get_default_graph():
      _recording.counts[key] = _recording.counts.get(key, 0) + count
    else:
      self._add(devices, count)

  def _add(self, devices, count):
    with tf.device('CPU:0'):
      self._counters[devices].assign_add(tf.constant(count, tf.int64))

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
